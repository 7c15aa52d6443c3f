// Values that a thread of Python's makes: what collectives read, and their results, while they wait for their
// turn.
#pragma once

#include "runtime/python.h"

namespace tpu {

// Adds the classes `Operand` and `Promise` to the extension's module.
void register_promises(py::module_& m);

}  // namespace tpu

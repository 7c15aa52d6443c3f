// The plug for collectives: a c10d backend whose work is done by a Python object.
#pragma once

#include "runtime/python.h"

namespace tpu {

// Adds `make_backend` and `replace_arrays` to the extension's module.
void register_process_group(py::module_& m);

}  // namespace tpu

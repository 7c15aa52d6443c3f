// Numbers that Python and the extension share.
#pragma once

#include "runtime/python.h"

namespace tpu {

// Adds `ENUMS` to the extension's module: a dict for each enumeration, numbers by name.
void register_enums(py::module_& m);

}  // namespace tpu

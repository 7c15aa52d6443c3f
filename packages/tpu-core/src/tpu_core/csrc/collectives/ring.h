// An all_reduce of arrays in the memory of hosts.
#pragma once

#include "runtime/python.h"

namespace tpu {

// Adds `ring_all_reduce` to the extension's module.
void register_ring(py::module_& m);

}  // namespace tpu

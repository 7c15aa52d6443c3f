// The Python module `tpu_distributed._C`: its parts.
#pragma once

#include <tpu_core/python.h>

namespace tpu {

// Adds `make_backend`: a c10d backend, each of whose collectives is done by a Python object.
void register_process_group(py::module_& m);

// Adds `ring_all_reduce`: an all_reduce of arrays in the memory of hosts.
void register_ring_all_reduce(py::module_& m);

}  // namespace tpu

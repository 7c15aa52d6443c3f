// Sums of sparse gradients in the default tiers, by PyTorch's CPU kernels.
#pragma once

#include "runtime/python.h"

#include <string>

namespace tpu {

// Registers a kernel of an op of COO tensors (``_coalesce``, ``add.out``, ``sparse_mask``) that calls the CPU's
// on the memory of the device's tensors, where CPU kernels may run; else the Python function `general`, which takes
// a list of arguments and a dictionary of those by keyword.
void register_sparse_gradients(const std::string& name, const py::function& general);

}  // namespace tpu

// Kernels of another dispatch key that a key of the device takes as its own.
#pragma once

#include <string>
#include <vector>

namespace tpu {

// Registers at ``key`` the kernels that ops of ATen (``add.Tensor``) have at ``source``: those of the CPU that
// do no more than call other ops. Names that this release of PyTorch lacks are left out.
void share_kernels(
    const std::string& key, const std::string& source, const std::vector<std::string>& names);

}  // namespace tpu

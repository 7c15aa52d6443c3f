// Foreach ops whose operands may lie on the CPU beside the device, as they may beside CUDA.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>

namespace tpu {

// The kernel of `_foreach_copy_`, or of an overload with a tensor of scalars; none for other ops.
std::optional<torch::CppFunction> foreach_kernel_of(const c10::OperatorHandle& op);

}  // namespace tpu

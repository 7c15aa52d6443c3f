// What `torch.jit.trace` and scripted functions ask of kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <memory>
#include <optional>

namespace tpu {

struct OpDescription;

// Keeps Python that runs for an op out of the trace that the op is in.
class NotTraced {
 public:
  NotTraced();
  ~NotTraced();
  NotTraced(const NotTraced&) = delete;

 private:
  std::shared_ptr<torch::jit::tracer::TracingState> state_;
};

// Gives lists of tensors on the stack the types of the schema: the interpreter makes a `Tensor?[]` with a
// type of its own, which is equal and not the same.
void give_lists_their_types(const OpDescription& d, torch::jit::Stack& stack);

// The kernel of `convolution`, of which PyTorch records no node; none for other ops.
std::optional<torch::CppFunction> convolution_kernel_of(const c10::OperatorHandle& op);

}  // namespace tpu

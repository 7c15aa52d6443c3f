// Ops that Python packages define: their recorder, their gradient, and a short way to call them.
#pragma once

#include "python.h"

#include <string>

namespace tpu {

// Makes `name` (``ns::op``) differentiable on the device. Its gradient is the op ``ns::op_backward``:
//
//     op_backward(Tensor?[] grads, <arguments of op>, int[] wanted) -> Tensor[]
//
// takes the gradient of each output tensor (lists flattened), and gives that of the argument tensors at
// the positions `wanted` (lists flattened). `define_backward` is called once, when it is first needed.
void register_differentiable(const std::string& name, py::function define_backward);
// Lets `name` pass autograd by: its results never require a gradient.
void register_not_differentiable(const std::string& name);

// A callable for the op. It takes plain tensors and numbers by position without PyTorch's general
// parser; `general` is called for everything else.
py::object op_caller(const std::string& name, py::object general);

}  // namespace tpu

// Ops that Python packages define: their recorder, their gradient, and a short way to call them.
#pragma once

#include "runtime/python.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace tpu {

c10::OperatorHandle handle_of(const std::string& name);  // of ``ns::op``

// Makes `name` (``ns::op``) differentiable on the device. Its gradient is the op ``ns::op_backward``:
//
//     op_backward(Tensor?[] grads, <arguments of op>, int[] wanted) -> Tensor[]
//
// takes the gradient of each output tensor (lists flattened), and gives that of the argument tensors at
// the positions `wanted` (lists flattened). In forward mode it is ``ns::op_jvp``:
//
//     op_jvp(Tensor?[] tangents, <arguments of op>) -> Tensor[]
//
// takes the tangent of each argument tensor, and gives that of each output of floating-point or complex
// dtype. `define_backward` and `define_forward` are called once, when the op is first needed.
void register_differentiable(
    const std::string& name, py::function define_backward, py::function define_forward);
// Lets `name` pass autograd by: its results never require a gradient.
void register_not_differentiable(const std::string& name);

// A callable for the op. It takes plain tensors, lists of them and numbers by position without PyTorch's
// general parser; `general` is called for everything else.
py::object op_caller(const std::string& name, const py::object& general);

}  // namespace tpu

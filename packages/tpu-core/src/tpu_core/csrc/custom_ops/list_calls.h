// Calls of ops that take one list of tensors, such as a compiled graph, past PyTorch's dispatcher.
#pragma once

#include "runtime/python.h"

#include <string>

namespace tpu {

// A callable of a list (or tuple) of tensors for an op ``(Tensor[], ...) -> Tensor[]`` of which the
// recorder is the only kernel; `others` are the op's other arguments, the same in every call. It gives a
// list of new tensors. `general`, of the list alone, is called instead wherever PyTorch might do anything
// on the way to the recorder: for subclasses, tensors of other devices, gradients, modes, transforms, a
// profiler.
py::object list_caller(const std::string& name, const py::tuple& others, const py::object& general);

}  // namespace tpu

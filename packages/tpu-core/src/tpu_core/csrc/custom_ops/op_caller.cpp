#include "custom_ops/callable.h"
#include "custom_ops/defined_ops.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <utility>

namespace tpu {
namespace {

bool push_list(torch::jit::Stack& stack, PyObject* value, const c10::Argument& expected) {
  const auto& element = *expected.type()->castRaw<c10::ListType>()->getElementType();
  if (!PyList_CheckExact(value) || element.kind() != c10::TypeKind::TensorType) return false;
  c10::List<at::Tensor> tensors;
  const auto n = PyList_GET_SIZE(value);
  tensors.reserve(n);
  for (Py_ssize_t i = 0; i < n; ++i) {
    auto* item = PyList_GET_ITEM(value, i);
    if (!THPVariable_CheckExact(item)) return false;
    tensors.push_back(THPVariable_Unpack(item));
  }
  stack.emplace_back(std::move(tensors));
  return true;
}

// Takes an argument of exactly the schema's type; what needs a conversion is left to PyTorch.
bool push(torch::jit::Stack& stack, PyObject* value, const c10::Argument& expected) {
  switch (expected.type()->kind()) {
    case c10::TypeKind::ListType: return push_list(stack, value, expected);
    case c10::TypeKind::TensorType:
      if (!THPVariable_CheckExact(value)) return false;
      stack.emplace_back(THPVariable_Unpack(value));
      return true;
    case c10::TypeKind::IntType:
      if (!PyLong_CheckExact(value)) return false;
      break;
    case c10::TypeKind::FloatType:
      if (!PyFloat_CheckExact(value)) return false;
      break;
    case c10::TypeKind::BoolType:
      if (!PyBool_Check(value)) return false;
      break;
    case c10::TypeKind::StringType:
      if (!PyUnicode_CheckExact(value)) return false;
      break;
    default: return false;
  }
  stack.push_back(torch::jit::toIValue(value, expected.type()));
  return true;
}

bool gather(
    torch::jit::Stack& stack, const c10::OperatorHandle& op, PyObject* const* args, size_t n) {
  const auto& arguments = op.schema().arguments();
  if (n > arguments.size() || at::impl::torch_function_mode_enabled()) return false;
  stack.reserve(arguments.size());
  for (size_t i = 0; i < n; ++i)
    if (arguments[i].kwarg_only() || !push(stack, args[i], arguments[i])) return false;
  for (size_t i = n; i < arguments.size(); ++i) {
    if (!arguments[i].default_value()) return false;
    stack.push_back(*arguments[i].default_value());
  }
  return true;
}

// What a call returns, with a short way for tensors and for one list of them.
PyObject* returned(torch::jit::Stack&& stack) {
  if (stack.size() == 1 && stack[0].isTensor())
    return THPVariable_Wrap(std::move(stack[0]).toTensor());
  if (stack.size() == 1 && stack[0].isTensorList()) {
    const auto tensors = stack[0].toTensorList();
    auto list =
        py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
    if (!list) throw py::error_already_set();
    for (size_t i = 0; i < tensors.size(); ++i)
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors.get(i)));
    return list.release().ptr();
  }
  return torch::jit::createPyObjectForStack(std::move(stack)).release().ptr();
}

}  // namespace

py::object op_caller(const std::string& name, const py::object& general) {
  return make_callable([op = handle_of(name), general](const PythonCall& c) -> PyObject* {
    torch::jit::Stack stack;
    if (c.kwnames || !gather(stack, op, c.args, c.count())) return c.pass_on(general);
    {
      py::gil_scoped_release no_gil;
      op.callBoxed(stack);
    }
    return returned(std::move(stack));
  });
}

}  // namespace tpu

#include "defined_ops.h"

#include "callable.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

c10::OperatorHandle handle_of(const std::string& name) {
  const auto parsed = torch::jit::parseName(name);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      parsed.name.c_str(), parsed.overload_name.c_str());
}

// Calls `f` on each tensor of the arguments, undefined ones included.
template <typename F>
void each_tensor(c10::ArrayRef<c10::IValue> values, F f) {
  for (const auto& v : values) {
    if (v.isTensor()) f(v.toTensor());
    else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorList()) f(t);
    else if (v.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList()) f(t ? *t : at::Tensor());
    else if (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensor())
      for (const auto& t : v.toListRef()) f(t.toTensor());
  }
}

// The op that is the gradient of another, found when it is first needed.
class Backward {
 public:
  Backward(std::string name, py::function define)
      : name_(std::move(name)), define_(define.release().ptr()) {}

  const c10::OperatorHandle& op() {
    std::call_once(once_, [this] {
      py::gil_scoped_acquire gil;
      py::reinterpret_borrow<py::function>(define_)();
      op_ = handle_of(name_ + "_backward");
    });
    return *op_;
  }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  PyObject* define_;  // never destroyed: static destructors run after the interpreter's end
  std::once_flag once_;
  std::optional<c10::OperatorHandle> op_;
};

struct Derivative final : torch::autograd::Node {
  explicit Derivative(Backward& backward) : backward_(backward) {}

  std::string name() const override {
    return backward_.name().substr(backward_.name().find("::") + 2) + "_backward";
  }

  // Saves the arguments, and leads to those that require a gradient.
  void save(c10::ArrayRef<c10::IValue> arguments) {
    int64_t position = 0;
    each_tensor(arguments, [&](const at::Tensor& t) {
      if (t.defined() && t.requires_grad()) {
        add_next_edge(torch::autograd::impl::gradient_edge(t));
        positions_.push_back(position);
      }
      tensors_.emplace_back(t, false);
      ++position;
    });
    for (const auto& v : arguments) {
      const bool list = v.isTensorList() || v.isOptionalTensorList();
      kinds_.push_back(v.isTensor() ? Kind::Tensor : list ? Kind::List : Kind::Other);
      others_.push_back(v.isTensor() ? c10::IValue() : list ? c10::IValue(length(v)) : v);
      optional_.push_back(v.isOptionalTensorList());
    }
  }

  variable_list apply(variable_list&& gradients) override {
    const auto& op = backward_.op();
    std::lock_guard<std::mutex> lock(mutex_);
    torch::jit::Stack stack;
    c10::List<std::optional<at::Tensor>> given;
    for (auto& g : gradients) given.push_back(g.defined() ? std::optional(g) : std::nullopt);
    stack.emplace_back(std::move(given));
    auto next = tensors_.begin();
    for (size_t i = 0; i < kinds_.size(); ++i) {
      if (kinds_[i] == Kind::Other) stack.push_back(others_[i]);
      else if (kinds_[i] == Kind::Tensor) stack.emplace_back((next++)->unpack());
      else stack.push_back(unpack_list(next, others_[i].toInt(), optional_[i]));
    }
    c10::List<int64_t> wanted;
    for (size_t i = 0; i < positions_.size(); ++i)
      if (task_should_compute_output(i)) wanted.push_back(positions_[i]);
    stack.emplace_back(wanted);
    op.callBoxed(stack);
    const auto computed = stack.back().toTensorVector();
    variable_list results;
    size_t used = 0;
    for (size_t i = 0; i < positions_.size(); ++i)
      results.push_back(task_should_compute_output(i) ? computed[used++] : at::Tensor());
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& t : tensors_) t.reset_data();
  }

 private:
  enum class Kind : uint8_t { Tensor, List, Other };

  static int64_t length(const c10::IValue& list) {
    return static_cast<int64_t>(list.toListRef().size());
  }

  static c10::IValue unpack_list(std::vector<SavedVariable>::iterator& next, int64_t n, bool optional) {
    c10::List<at::Tensor> tensors;
    c10::List<std::optional<at::Tensor>> some;
    for (int64_t i = 0; i < n; ++i, ++next) {
      auto t = next->unpack();
      if (optional) some.push_back(t.defined() ? std::optional(t) : std::nullopt);
      else tensors.push_back(t);
    }
    return optional ? c10::IValue(some) : c10::IValue(tensors);
  }

  Backward& backward_;
  std::vector<SavedVariable> tensors_;  // those of the arguments, lists flattened
  std::vector<Kind> kinds_;             // of each argument
  std::vector<c10::IValue> others_;     // arguments that are no tensors; lengths of lists
  std::vector<uint8_t> optional_;
  std::vector<int64_t> positions_;      // among `tensors_`, of each next edge
};

void set_history(at::Tensor t, const c10::intrusive_ptr<Derivative>& node) {
  if (t.defined() && (t.is_floating_point() || t.is_complex()))
    torch::autograd::impl::set_gradient_edge(t, {node, node->add_input_metadata(t)});
  else
    node->add_input_metadata(torch::autograd::Node::undefined_input());
}

// The autograd kernel of an op.
class Differentiable final : public c10::OperatorKernel {
 public:
  explicit Differentiable(Backward& backward) : backward_(backward) {}

  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto n = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - n, n);
    bool required = false;
    each_tensor(arguments, [&](const at::Tensor& t) {
      required = required || t.requires_grad();
      TORCH_CHECK_NOT_IMPLEMENTED(
          !t.defined() || !t._fw_grad(0).defined(), op.schema().name(),
          " has no forward-mode derivative. Use reverse mode: torch.autograd.grad, torch.func.vjp.");
    });
    c10::intrusive_ptr<Derivative> node;
    if (required && c10::GradMode::is_enabled()) {
      node = c10::make_intrusive<Derivative>(backward_);
      node->save(arguments);
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
    if (!node) return;
    const auto returned = op.schema().returns().size();
    each_tensor(
        c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - returned, returned),
        [&](const at::Tensor& t) { set_history(t, node); });
  }

 private:
  Backward& backward_;
};

void register_autograd(const std::string& name, torch::CppFunction&& kernel) {
  const auto parsed = torch::jit::parseName(name);
  const auto colons = parsed.name.find("::");
  // Never destroyed: the registration ends with the library object.
  auto* library = new torch::Library(
      torch::Library::IMPL, parsed.name.substr(0, colons), c10::DispatchKey::AutogradPrivateUse1,
      __FILE__, __LINE__);
  library->impl(name.substr(colons + 2).c_str(), std::move(kernel));
}

// --- calls from Python ---------------------------------------------------------------------------

// Takes an argument of exactly the schema's type; what needs a conversion is left to PyTorch.
bool push(torch::jit::Stack& stack, PyObject* value, const c10::Argument& expected) {
  switch (expected.type()->kind()) {
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
    default:
      return false;
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

}  // namespace

void register_differentiable(const std::string& name, py::function define_backward) {
  auto* backward = new Backward(name, std::move(define_backward));
  register_autograd(
      name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Differentiable>(*backward)));
}

void register_not_differentiable(const std::string& name) {
  register_autograd(name, torch::CppFunction::makeFallthrough());
}

py::object op_caller(const std::string& name, py::object general) {
  return make_callable([op = handle_of(name), general](const PythonCall& c) -> PyObject* {
    torch::jit::Stack stack;
    if (c.kwnames || !gather(stack, op, c.args, c.count())) return c.pass_on(general);
    {
      py::gil_scoped_release no_gil;
      op.callBoxed(stack);
    }
    if (stack.size() == 1 && stack[0].isTensor())
      return THPVariable_Wrap(std::move(stack[0]).toTensor());
    return torch::jit::createPyObjectForStack(std::move(stack)).release().ptr();
  });
}

}  // namespace tpu

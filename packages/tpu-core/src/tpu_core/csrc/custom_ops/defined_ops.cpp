#include "custom_ops/defined_ops.h"

#include "runtime/torch_compat.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Calls `f` on each tensor of the arguments, undefined ones included.
template <typename F>
void each_tensor(c10::ArrayRef<c10::IValue> values, F f) {
  for (const auto& v : values) {
    if (v.isTensor()) f(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorList()) f(t);
    else if (v.isOptionalTensorList())
      for (const std::optional<at::Tensor> t : v.toOptionalTensorList()) f(t ? *t : at::Tensor());
    else if (v.isList() && !v.toListRef().empty() && v.toListRef()[0].isTensor())
      for (const auto& t : v.toListRef()) f(t.toTensor());
  }
}

// An op that belongs to another: its gradient, its tangents. Found when it is first needed.
class Companion {
 public:
  Companion(const std::string& name, const char* suffix, py::function define)
      : name_(name + suffix), define_(define.release().ptr()) {}

  const c10::OperatorHandle& op() {
    // Who waits for the first caller must not hold what that one needs.
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    std::call_once(once_, [this] {
      py::gil_scoped_acquire gil;
      py::reinterpret_borrow<py::function>(define_)();
      op_ = handle_of(name_);
    });
    return *op_;
  }
  std::string short_name() const { return name_.substr(name_.find("::") + 2); }

 private:
  std::string name_;
  PyObject* define_;  // never destroyed: static destructors run after the interpreter's end
  std::once_flag once_;
  std::optional<c10::OperatorHandle> op_;
};

// What a gradient is computed of besides tensors: how its op is called.
struct BackwardCall {
  enum class Kind : uint8_t { Tensor, List, OptionalList, Other };

  explicit BackwardCall(Companion& b) : backward(b) {}

  Companion& backward;
  std::vector<Kind> kinds;          // of each argument
  std::vector<c10::IValue> others;  // arguments that are no tensors; lengths of lists
  std::vector<int64_t> positions;   // of the tensors that a gradient leads to, lists flattened

  // The gradients at `positions`, undefined where one is not `needed`.
  variable_list operator()(
      const variable_list& gradients, const variable_list& tensors,
      const std::vector<bool>& needed) const {
    torch::jit::Stack stack;
    c10::List<std::optional<at::Tensor>> given;
    for (const auto& g : gradients) given.push_back(g.defined() ? std::optional(g) : std::nullopt);
    stack.emplace_back(std::move(given));
    auto next = tensors.begin();
    for (size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i] == Kind::Other) stack.push_back(others[i]);
      else if (kinds[i] == Kind::Tensor) stack.emplace_back(*next++);
      else stack.push_back(list(next, others[i].toInt(), kinds[i]));
    }
    c10::List<int64_t> wanted;
    for (size_t i = 0; i < positions.size(); ++i)
      if (needed[i]) wanted.push_back(positions[i]);
    stack.emplace_back(wanted);
    backward.op().callBoxed(stack);
    const auto computed = stack.back().toTensorVector();
    variable_list results;
    size_t used = 0;
    for (size_t i = 0; i < positions.size(); ++i)
      results.push_back(needed[i] ? computed[used++] : at::Tensor());
    return results;
  }

 private:
  static c10::IValue list(variable_list::const_iterator& next, int64_t n, Kind kind) {
    c10::List<at::Tensor> tensors;
    c10::List<std::optional<at::Tensor>> some;
    for (int64_t i = 0; i < n; ++i, ++next) {
      if (kind == Kind::List) tensors.push_back(*next);
      else some.push_back(next->defined() ? std::optional(*next) : std::nullopt);
    }
    return kind == Kind::List ? c10::IValue(tensors) : c10::IValue(some);
  }
};

struct Derivative final : torch::autograd::Node {
  explicit Derivative(Companion& backward) : call_(backward) {}

  std::string name() const override { return call_.backward.short_name(); }

  // Saves the arguments, and leads to those that require a gradient.
  void save(c10::ArrayRef<c10::IValue> arguments) {
    using Kind = BackwardCall::Kind;
    int64_t position = 0;
    tensors_.reserve(arguments.size());
    call_.kinds.reserve(arguments.size());
    call_.others.reserve(arguments.size());
    each_tensor(arguments, [&](const at::Tensor& t) {
      if (t.defined() && t.requires_grad()) {
        add_next_edge(torch::autograd::impl::gradient_edge(t));
        call_.positions.push_back(position);
      }
      tensors_.emplace_back(t, false);
      ++position;
    });
    for (const auto& v : arguments) {
      const bool optional = v.isOptionalTensorList(), list = optional || v.isTensorList();
      call_.kinds.push_back(
          v.isTensor()   ? Kind::Tensor
              : optional ? Kind::OptionalList
              : list     ? Kind::List
                         : Kind::Other);
      call_.others.push_back(v.isTensor() ? c10::IValue() : list ? c10::IValue(length(v)) : v);
    }
  }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return call_(gradients, unpacked(), needed());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& t : tensors_) t.reset_data();
  }

  // For compiled autograd: what a graph is made for. Numbers and texts are constants of it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    args.collect(tensors_, /*is_output=*/false);
    args.collect(call_.positions);
    for (size_t i = 0; i < call_.kinds.size(); ++i) {
      args.collect(static_cast<int64_t>(call_.kinds[i]));
      args.collect(call_.others[i], /*nested=*/true);
    }
  }

  // The node in the graph that compiled autograd makes: a function of gradients and saved tensors.
  variable_list apply_with_saved(
      const variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(tensors_);
    const auto tensors = unpacked();
    saved.after(tensors_);
    std::vector<c10::IValue> present;
    std::vector<bool> defined;
    for (const auto& t : tensors) {
      defined.push_back(t.defined());
      if (t.defined()) present.emplace_back(t);
    }
    const auto function = [call = call_, defined, needed = needed()](
                              const variable_list& gradients,
                              const std::vector<c10::IValue>& given) {
      auto next = given.begin();
      variable_list filled;
      for (const bool d : defined) filled.push_back(d ? (next++)->toTensor() : at::Tensor());
      return call(gradients, filled, needed);
    };
    namespace compiled = torch::dynamo::autograd;
    using Edges = std::vector<std::optional<torch::autograd::InputMetadata>>;
    const auto& python = compiled::getPyCompilerInterface();
    const std::vector<at::TypePtr> types(present.size(), at::TensorType::get());
    const auto bound = python->bind_function(
        saved.get_py_compiler(), name(), function, types, /*is_custom_function=*/true);
    const auto results =
        compiled::IValuePacker<Edges>::pack(compiled::get_input_metadata(next_edges()));
    return python->call_function(
        saved.get_py_compiler(), "apply_functional", bound, gradients, present, results);
  }

 private:
  static int64_t length(const c10::IValue& list) {
    return static_cast<int64_t>(list.toListRef().size());
  }

  variable_list unpacked() const {
    variable_list tensors;
    tensors.reserve(tensors_.size());
    for (const auto& t : tensors_) tensors.push_back(t.unpack());
    return tensors;
  }

  std::vector<bool> needed() const {
    std::vector<bool> needed(call_.positions.size());
    for (size_t i = 0; i < needed.size(); ++i) needed[i] = task_should_compute_output(i);
    return needed;
  }

  BackwardCall call_;
  std::vector<SavedVariable> tensors_;  // those of the arguments, lists flattened
};

bool has_derivative(const at::Tensor& t) {
  return t.defined() && (t.is_floating_point() || t.is_complex());
}

void set_history(const at::Tensor& t, const NodePtr<Derivative>& node) {
  if (has_derivative(t))
    torch::autograd::impl::set_gradient_edge(t, {node, node->add_input_metadata(t)});
  else node->add_input_metadata(torch::autograd::Node::undefined_input());
}

// The arguments without their tangents, which are appended to `tangents`, undefined for none.
c10::IValue without_tangents(
    const c10::IValue& value, c10::List<std::optional<at::Tensor>>& tangents) {
  const auto primal = [&](const at::Tensor& t) {
    const auto tangent = t.defined() ? t._fw_grad(0) : at::Tensor();
    tangents.push_back(tangent.defined() ? std::optional(tangent) : std::nullopt);
    return tangent.defined() ? t._fw_primal(0) : t;
  };
  if (value.isTensor()) return primal(value.toTensor());
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor> t : value.toOptionalTensorList()) {
      const auto p = primal(t ? *t : at::Tensor());
      found.push_back(p.defined() ? std::optional(p) : std::nullopt);
    }
    return found;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& t : value.toTensorList()) found.push_back(primal(t));
    return found;
  }
  return value;
}

// The autograd kernel of an op.
class Differentiable final : public c10::OperatorKernel {
 public:
  Differentiable(Companion& backward, Companion& forward)
      : backward_(backward), forward_(forward) {}

  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto n = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - n, n);
    bool required = false, tangents = false;
    each_tensor(arguments, [&](const at::Tensor& t) {
      required = required || t.requires_grad();
      tangents = tangents || (t.defined() && t._fw_grad(0).defined());
    });
    NodePtr<Derivative> node;
    if (required && c10::GradMode::is_enabled()) {
      node = make_node<Derivative>(backward_);
      node->save(arguments);
    }
    const auto moved = tangents ? pushed_forward(arguments) : variable_list();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
    if (!node && !tangents) return;
    const auto returned = op.schema().returns().size();
    auto next = moved.begin();
    each_tensor(
        c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - returned, returned),
        [&](const at::Tensor& t) {
          if (node) set_history(t, node);
          if (tangents && has_derivative(t)) t._set_fw_grad(*next++, 0, /*is_inplace_op=*/false);
        });
  }

 private:
  // The tangents of the results that have a derivative.
  variable_list pushed_forward(c10::ArrayRef<c10::IValue> arguments) {
    c10::List<std::optional<at::Tensor>> tangents;
    torch::jit::Stack stack(1);
    for (const auto& value : arguments) stack.push_back(without_tangents(value, tangents));
    stack[0] = std::move(tangents);
    forward_.op().callBoxed(stack);
    return stack.back().toTensorVector();
  }

  Companion& backward_;
  Companion& forward_;
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

}  // namespace

c10::OperatorHandle handle_of(const std::string& name) {
  const auto parsed = torch::jit::parseName(name);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      parsed.name.c_str(), parsed.overload_name.c_str());
}

void register_differentiable(
    const std::string& name, py::function define_backward, py::function define_forward) {
  auto* backward = new Companion(name, "_backward", std::move(define_backward));
  auto* forward = new Companion(name, "_jvp", std::move(define_forward));
  register_autograd(
      name,
      torch::CppFunction::makeFromBoxedFunctor(
          std::make_unique<Differentiable>(*backward, *forward)));
}

void register_not_differentiable(const std::string& name) {
  register_autograd(name, torch::CppFunction::makeFallthrough());
}

}  // namespace tpu

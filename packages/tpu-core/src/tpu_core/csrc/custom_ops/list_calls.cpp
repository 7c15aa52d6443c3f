#include "custom_ops/list_calls.h"

#include "custom_ops/callable.h"
#include "recorder/record.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <utility>
#include <vector>

namespace tpu {
namespace {

using Borrow = c10::MaybeOwnedTraits<at::Tensor>;

// The tensors of a Python sequence, borrowed from it: a reference to a tensor that Python holds costs a
// tenth of a microsecond.
class Borrowed {
 public:
  explicit Borrowed(size_t n) : list_(c10::TensorType::get()) { list_.reserve(n); }
  ~Borrowed() {
    const c10::IValue list = list_;
    for (const c10::IValue& borrowed : list.toListRef())  // of nobody else: it may be changed
      c10::MaybeOwnedTraits<c10::IValue>::destroyBorrow(const_cast<c10::IValue&>(borrowed));
  }
  void add(const at::Tensor& t) { list_.push_back(Borrow::createBorrow(t)); }
  const c10::impl::GenericList& list() const { return list_; }

 private:
  c10::impl::GenericList list_;
};

bool is_within(c10::DispatchKeySet keys, c10::DispatchKeySet all) { return (keys | all) == all; }

// Whether PyTorch would do nothing on the way to the recorder.
bool is_plain_here() {
  constexpr auto usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  return is_within(c10::impl::tls_local_dispatch_key_set().included_, usual) &&
      !at::impl::torch_function_mode_enabled() &&
      !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

// The same of a tensor.
bool is_plain(const at::Tensor& t, bool grad_enabled) {
  constexpr c10::DispatchKeySet usual(
      {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1,
       c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastPrivateUse1});
  return t.defined() && is_within(t.key_set(), usual) && !(grad_enabled && t.requires_grad());
}

// Calls the op of `description` with the tensors of a list or tuple in place of its first argument; null
// where that is for PyTorch to do.
PyObject* record_list(
    const OpDescription& description, PyObject* sequence, std::vector<c10::IValue> arguments) {
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence));
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  Borrowed tensors(n);
  const bool grad_enabled = c10::GradMode::is_enabled();
  for (size_t i = 0; i < n; ++i) {
    if (!THPVariable_CheckExact(items[i])) return nullptr;
    const auto& t = THPVariable_Unpack(items[i]);
    if (!is_plain(t, grad_enabled)) return nullptr;
    tensors.add(t);
  }
  arguments[0] = tensors.list();
  auto recorded = record_call(description, arguments.data());
  if (recorded.handler) return nullptr;
  if (recorded.results)
    for (const at::Tensor& t : recorded.results->at(0).toTensorVector())
      recorded.fresh.push_back(t);
  py::list results(recorded.fresh.size());
  for (size_t i = 0; i < recorded.fresh.size(); ++i) {
    PyObject* made = THPVariable_Wrap(std::move(recorded.fresh[i]));
    if (!made) throw python_error();
    PyList_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), made);
  }
  return results.release().ptr();
}

}  // namespace

py::object list_caller(
    const std::string& name, const py::tuple& others, const py::object& general) {
  const auto parsed = torch::jit::parseName(name);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      parsed.name.c_str(), parsed.overload_name.c_str());
  const auto& expected = op.schema().arguments();
  TORCH_INTERNAL_ASSERT(expected.size() == others.size() + 1);
  std::vector<c10::IValue> arguments(1);
  for (size_t i = 0; i < others.size(); ++i)
    arguments.push_back(torch::jit::toIValue(others[i], expected[i + 1].type()));
  const OpDescription* description = nullptr;
  return make_callable([=](const PythonCall& c) mutable -> PyObject* {
    const bool takes = c.count() == 1 && !c.kwnames &&
        (PyList_CheckExact(c.args[0]) || PyTuple_CheckExact(c.args[0]));
    if (takes && is_plain_here()) {
      if (!description) description = describe_op(op);
      if (auto* results = record_list(*description, c.args[0], arguments)) return results;
    }
    return c.pass_on(general);
  });
}

}  // namespace tpu

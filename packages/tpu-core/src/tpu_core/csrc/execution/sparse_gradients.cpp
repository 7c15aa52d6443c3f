#include "execution/sparse_gradients.h"

#include "execution/direct_call.h"
#include "execution/host_memory.h"
#include "execution/profiler.h"
#include "recorder/capture.h"

#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <memory>
#include <unordered_map>

namespace tpu {
namespace {

bool is_sparse(const at::Tensor& t) { return t.is_privateuseone() && t.layout() == at::kSparse; }

bool is_dense_of(const at::Tensor& t, const at::Tensor& sparse) {
  return t.layout() == at::kStrided && is_plain_tensor(t) && t.device() == sparse.device() &&
      t.scalar_type() == sparse.scalar_type() && t.sizes() == sparse.sizes();
}

// CPU tensors on the memory of the device's, and results of kernels on them.
class HostTensors {
 public:
  explicit HostTensors(const at::Tensor& sparse)
      : results_(static_cast<int16_t>(sparse.device().index())) {
    const Lock lock(g_mutex);
    end_host_segment(static_cast<int16_t>(sparse.device().index()));
  }

  at::Tensor operand(const at::Tensor& t, bool is_written = false) {
    auto alias = host_alias(t, is_written);
    results_.is_operand(alias);
    return alias;
  }
  at::Tensor sparse_operand(const at::Tensor& t) {
    const auto* impl = static_cast<const at::SparseTensorImpl*>(t.unsafeGetTensorImpl());
    return coo(operand(impl->indices()), operand(impl->values()), t);
  }
  at::Tensor sparse_result(const at::Tensor& t) {
    return coo(results_(whole(t._indices())), results_(whole(t._values())), t);
  }

 private:
  static at::Tensor coo(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& t) {
    return at::_sparse_coo_tensor_unsafe(
        indices, values, t.sizes(), values.options().layout(at::kSparse), t.is_coalesced());
  }
  // A kernel makes room for as many elements as there may be.
  static at::Tensor whole(const at::Tensor& t) {
    return t.is_contiguous() && t.nbytes() == t.storage().nbytes()
        ? t
        : t.clone(at::MemoryFormat::Contiguous);
  }

  Results results_;
};

// Each takes the arguments from the stack and puts the result there, unless it leaves them and returns false.
bool coalesce(torch::jit::Stack& stack) {
  const at::Tensor self = stack.back().toTensor();
  if (!is_sparse(self)) return false;
  HostTensors host(self);
  stack.back() = host.sparse_result(at::_coalesce(host.sparse_operand(self)));
  return true;
}

bool add_out(torch::jit::Stack& stack) {
  const auto args = torch::jit::last(stack, 4);
  if (!args[0].isTensor() || !args[1].isTensor() || args[2].toScalar().isComplex()) return false;
  const at::Tensor out = args[3].toTensor(), other = args[1].toTensor();
  const auto alpha = args[2].toScalar();
  // Of elements, ATen's kernel counts the offset of a view twice.
  const bool has_rows = is_sparse(other) && other.sparse_dim() > 0 &&
      (other.dense_dim() > 0 || out.storage_offset() == 0);
  const bool is_sum = has_rows && args[0].toTensor().is_same(out) && out.is_floating_point() &&
      is_dense_of(out, other);
  if (!is_sum) return false;
  HostTensors host(other);
  const auto gradient = host.sparse_operand(other);
  auto sum = host.operand(out, true);
  Writing writing;
  {
    Lock lock(g_mutex);
    writing.add(cell_of(out)->value);
    writing.begin();
  }
  at::add_out(sum, sum, gradient, alpha);
  torch::jit::drop(stack, 4);
  stack.emplace_back(out);
  return true;
}

bool sparse_mask(torch::jit::Stack& stack) {
  const auto args = torch::jit::last(stack, 2);
  const at::Tensor self = args[0].toTensor(), mask = args[1].toTensor();
  if (!is_sparse(mask) || !mask.sparse_dim() || !is_dense_of(self, mask)) return false;
  HostTensors host(mask);
  const auto found = host.operand(self).sparse_mask(host.sparse_operand(mask));
  torch::jit::drop(stack, 2);
  stack.emplace_back(host.sparse_result(found));
  return true;
}

using Compute = bool (*)(torch::jit::Stack&);
const std::unordered_map<std::string, Compute> kComputes{
    {"_coalesce", &coalesce}, {"add.out", &add_out}, {"sparse_mask", &sparse_mask}};

// A sparse optimizer's step makes ten of these calls a table; of dense ops each is ten more.
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Compute compute, py::function general)
      : compute_(compute), general_(general.release()) {}  // outlives the interpreter

  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) const {
    if (!runs_on_host() || !compute(*stack)) call_general(op, *stack);
  }

 private:
  static bool runs_on_host() {
    return tiers() != Tiers::Compiled && !in_bad_fork() && !any_captures() && !is_profiling();
  }
  bool compute(torch::jit::Stack& stack) const {
    const WithoutGil no_gil;
    const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
    if (!compute_(stack)) return false;
    if (count_host_op()) resume_collector();
    return true;
  }
  void call_general(const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size();
    py::gil_scoped_acquire gil;
    py::list positional;
    py::dict keywords;
    for (size_t i = 0; i < n; ++i) {
      const auto& a = schema.arguments()[i];
      auto value = torch::jit::toPyObject(stack[stack.size() - n + i]);
      if (a.kwarg_only()) keywords[a.name().c_str()] = value;
      else positional.append(value);
    }
    const py::object result = Function(general_)(positional, keywords);
    torch::jit::drop(stack, n);
    stack.push_back(torch::jit::toIValue(result, schema.returns()[0].type()));
  }

  Compute compute_;
  py::handle general_;
};

}  // namespace

void register_sparse_gradients(const std::string& name, const py::function& general) {
  // Never destroyed: the registration ends with the library object.
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__);
  library->impl(
      name.c_str(),
      torch::CppFunction::makeFromBoxedFunctor(
          std::make_unique<Kernel>(kComputes.at(name), general)));
}

}  // namespace tpu

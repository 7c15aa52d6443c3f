#include "execution/host_kernels.h"

#include "execution/direct_call.h"
#include "execution/host_memory.h"
#include "execution/profiler.h"
#include "recorder/threads.h"
#include "recorder/trace.h"
#include "runtime/source_location.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace tpu {
namespace {

std::atomic<Tiers> g_tiers{Tiers::Compiled};
// Ops after which a program is under way: Python's collector looks at the objects of its start again.
constexpr uint64_t kFirstOps = 1000;

// Overloads that PyTorch calls on the device in place of those that the CPU has, with the same arguments.
const std::unordered_map<std::string, const char*> kTwins{
    {"aten::convolution_overrideable", "aten::convolution"},
    {"aten::convolution_backward_overrideable", "aten::convolution_backward"},
};

struct WrittenTensor {
  at::Tensor original, alias;
};

// An out= tensor takes the geometry that the CPU kernel gave its alias.
void follow(const at::Tensor& t, at::Tensor alias, int16_t device) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  const bool moved = alias.storage().nbytes() != storage->nbytes();
  if (!moved && t.sizes() == alias.sizes() && t.strides() == alias.strides()) return;
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_offset(alias.storage_offset());
  impl->set_sizes_and_strides(alias.sizes(), alias.strides());
  if (!moved) return;
  resize_storage(storage, alias.storage().nbytes());
  auto value = value_of_memory(alias, device);
  Lock lock(g_mutex);
  cell_of(storage)->value = std::move(value);
}

// Puts CPU tensors in place of the device's, lists included.
class Aliases {
 public:
  // `is_foreign`: the kernel gets no tensor that a value holds.
  Aliases(Results& results, std::vector<WrittenTensor>& written, bool is_foreign)
      : results_(results), written_(written), is_foreign_(is_foreign) {}

  at::Tensor operator()(const at::Tensor& t, bool is_written) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    for (const auto& w : written_)  // PyTorch asks whether an operand is the result itself
      if (w.original.is_same(t)) return w.alias;
    const auto& v = *cell_of(t)->value;
    if (!is_written && !is_foreign_ && is_the_value(t, v)) {
      results_.is_operand(v.host);
      return v.host;
    }
    auto alias = alias_of(t, v.host);
    results_.is_operand(alias);
    if (is_written) written_.push_back({t, alias});
    return alias;
  }

  c10::IValue operator()(const c10::IValue& v, bool is_written) {
    if (v.isTensor()) return (*this)(v.toTensor(), is_written);
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back((*this)(t, is_written));
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional((*this)(*t, is_written)) : std::nullopt);
      return list;
    }
    if (v.isList() && !v.toListRef().empty() && v.toListRef()[0].isTensor()) {
      c10::List<at::Tensor> list;
      for (const auto& t : v.toListRef()) list.push_back((*this)(t.toTensor(), is_written));
      return list;
    }
    if (v.isDevice()) return c10::Device(c10::kCPU);
    return v;
  }

 private:
  Results& results_;
  std::vector<WrittenTensor>& written_;
  bool is_foreign_;
};

template <typename F>
void each_access(Call& c, F f) {
  for (auto& a : c.reads) f(a, false);
  for (auto& a : c.writes) f(a, true);
}

// Whether each operand's memory is on the host, and that of what is written is of its own. Needs g_mutex.
bool is_prepared(Call& c) {
  bool prepared = true;
  each_access(c, [&](const Access& a, bool is_written) {
    const auto& v = a.cell->value;
    prepared = prepared && v->state == State::Host && is_in_memory_order(v->host, v->layout) &&
        (!is_written || is_exclusive(v));
  });
  return prepared;
}

// Waits for the operands and has their memory on the host. What the call writes has memory of its own then.
void prepare(Call& c, const OpDescription& d) {
  each_access(c, [](Access& a, bool) {
    ValuePtr v;
    {
      Lock lock(g_mutex);
      v = a.cell->value;
      if (v->state != State::Uninitialized) settle(v, lock, kForHost);
    }
    bring_to_host(v);
  });
  // An out= tensor may be made smaller and keep what lies behind.
  const bool fills = d.write_only && !d.op.schema().arguments().back().is_out();
  for (auto& a : c.writes) make_exclusive(a.cell, !(fills && a.overwrites));
}

// Python's refusal says what to do in place of a sparse tensor.
bool gives_sparse(const c10::IValue* args) { return args[9].toBool(); }

// The CPU's kernel gives each row of an image of width 1 the result of the first one.
bool is_of_width_1(const c10::IValue* args) { return args[1].toDimVector().back() == 1; }

const std::unordered_map<std::string, UnfitCall> kUnfitCalls{
    {"aten::_embedding_bag_backward", gives_sparse},
    {"aten::_upsample_bilinear2d_aa", is_of_width_1},
    {"aten::_upsample_bilinear2d_aa.out", is_of_width_1},
    {"aten::_upsample_bicubic2d_aa", is_of_width_1},
    {"aten::_upsample_bicubic2d_aa.out", is_of_width_1},
};

c10::OperatorName operator_name(const std::string& name) {  // "aten::add.Tensor"
  const auto dot = name.find('.');
  if (dot == std::string::npos) return {name, ""};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

}  // namespace

const c10::OperatorHandle* host_kernel(const OpDescription& d) {
  auto find = [&]() -> std::optional<c10::OperatorHandle> {
    if (d.random || d.function) return {};
    // An op of another library without a lowering runs on the CPU in any case.
    if (d.is_foreign && !(d.has_handler() && d.returns.size() == d.op.schema().returns().size()))
      return {};
    const auto twin = kTwins.find(d.name);
    auto op = c10::Dispatcher::singleton().findOp(
        operator_name(twin == kTwins.end() ? d.name : twin->second));
    if (!op || op->hasTag(at::Tag::nondeterministic_seeded)) return {};
    if (d.name.find("nested") != std::string::npos || d.name.find("sparse") != std::string::npos)
      return {};
    for (const auto& r : op->schema().returns()) {
      if (r.alias_info() && !r.alias_info()->isWrite()) return {};
    }
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return {};
    return op;
  };
  std::call_once(d.host_sought, [&] {
    const auto unfit = kUnfitCalls.find(d.name);
    if (unfit != kUnfitCalls.end()) d.is_unfit_for_host = unfit->second;
    d.function = host_function(d.name);
    d.host = find();
    if (d.host) d.small = small_pointwise(d.name);
  });
  return d.host ? &*d.host : nullptr;
}

void set_tiers(Tiers tiers) { g_tiers = tiers; }
Tiers tiers() {
  // What fits is asked of programs, of which one that does not leaves no trace.
  return memory_is_checked() ? Tiers::Compiled : g_tiers.load(std::memory_order_relaxed);
}

bool count_host_op() { return ++counters().host_ops == kFirstOps; }
void resume_collector() {
  py::gil_scoped_acquire gil;
  callback("resume_collector")();
}

namespace {

// Whether autograd makes a node of the call.
bool is_differentiated(c10::ArrayRef<c10::IValue> args) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(args.begin(), args.end(), [](const c10::IValue& v) {
    return v.isTensor() && v.toTensor().requires_grad();
  });
}

}  // namespace

HostCall::HostCall(const OpDescription& d, const c10::IValue* args)
    : d_(d), args_(args), kernel_(host_kernel(d)) {
  if (kernel_ && d.is_unfit_for_host && d.is_unfit_for_host(args)) kernel_ = nullptr;
  if (!kernel_) function_ = function_of_call(d, args);
}

std::optional<torch::jit::Stack> HostCall::run(Call& c, Lock& lock) const {
  const size_t n = d_.policies.size();
  ThreefryKey key{};
  each_access(c, [](Access& a, bool) { a.value.reset(); });
  if (c.device < 0) c.device = current_device();
  if (function_ && draws(d_, args_)) {
    const auto [seed, offset] = draw_seed(c, d_, args_, n);
    key = derive_key(seed, offset);
  }
  while (!is_prepared(c)) {  // another thread may come between
    lock.unlock();
    prepare(c, d_);
    lock.lock();
  }
  Results results(c.device);
  std::vector<WrittenTensor> written;
  torch::jit::Stack stack;
  stack.reserve(n);
  {
    Aliases aliases(results, written, d_.is_foreign);
    stack.resize(n);
    for (const bool is_written : {true, false})
      for (size_t i = 0; i < n; ++i)
        if (d_.writes[i] == is_written) stack[i] = aliases(args_[i], is_written);
  }
  const bool under_way = count_host_op();
  // The line of the backward ops too.
  const Line line = is_profiling() || is_differentiated(c10::ArrayRef<c10::IValue>(args_, n))
      ? user_line()
      : Line{};
  const int64_t started = is_profiling() ? profiler_time() : 0;
  Writing writing;
  for (const auto& a : c.writes) writing.add(a.cell->value);
  writing.begin();
  lock.unlock();
  try {
    std::optional<c10::impl::ExcludeDispatchKeyGuard> below;
    if (!d_.is_foreign) below.emplace(kAboveKernels);
    // The kernel's row is the device's: its own calls would count the op twice.
    std::optional<at::DisableRecordFunctionGuard> unrecorded;
    if (started) unrecorded.emplace();
    if (function_) function_(key, stack);
    else if (below) kernel_->callBoxed(stack);
    else kernel_->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  } catch (const c10::NotImplementedError&) {
    return {};  // of the dtype: a lowering may have it, or raises the same in the device's name
  }
  if (started) note_host_op(d_.name, line, c.device, started);
  if (under_way) resume_collector();
  for (const auto& w : written) follow(w.original, w.alias, c.device);
  results.replace(stack.data(), stack.size(), d_.returns, args_);
  return stack;
}

}  // namespace tpu

#include "execution/host_kernels.h"

#include "execution/profiler.h"
#include "execution/program.h"
#include "recorder/capture.h"
#include "recorder/tensors.h"
#include "recorder/threads.h"
#include "runtime/source_location.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
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

bool is_dense_strided(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_quantized() && !t.is_nested();
}

// Whether the host tensor lies in memory as the layout says, from its storage's first byte on.
bool is_in_memory_order(const at::Tensor& host, const Layout& l) {
  return host.storage_offset() == 0 &&
      (l.untyped || host.numel() == 0 || host.strides() == at::IntArrayRef(l.strides));
}

at::TensorOptions options_of(const Layout& l) { return at::TensorOptions().dtype(l.dtype); }

// The value's memory on the host, elements in the order of its layout; the value is settled.
void bring_to_host(const ValuePtr& v) {
  const auto& l = v->layout;
  at::Tensor host;
  bool is_borrowed = false;
  {
    Lock lock(g_mutex);
    if (v->state == State::Host && is_in_memory_order(v->host, l)) return;
    if (v->state == State::Host) host = v->host;
    if (v->state == State::Uninitialized)
      host =
          l.untyped ? at::zeros({static_cast<int64_t>(v->nbytes)}, at::kByte) : memory_like(l, {});
  }
  if (!host.defined()) {
    host = host_memory(v);
    is_borrowed = true;
  }
  if (!is_in_memory_order(host, l)) {
    host = memory_like(l, host);
    is_borrowed = false;
  }
  Lock lock(g_mutex);
  // Another thread was first, and may have written by now.
  if (v->state == State::Host && is_in_memory_order(v->host, l)) return;
  if (v->state == State::Ready && v->array) v->set_host(host, is_borrowed);
  else if (v->state == State::Host || v->state == State::Uninitialized) v->set_host(host, false);
}

bool is_exclusive(const ValuePtr& v) {
  return v.use_count() == 1 && !v->borrowed && v->holds == 0 && v->host.use_count() == 1 &&
      v->host.storage().use_count() == 1;
}

// Gives a cell memory that nothing else reads; `keeps`: with what it holds.
void make_exclusive(Cell* cell, bool keeps) {
  ValuePtr old;
  {
    Lock lock(g_mutex);
    // Threads may write parts of one tensor: a copy that is made meanwhile would lack what they write.
    while (cell->value->writers) wait_for_change(lock);
    if (is_exclusive(cell->value)) return;
    old = cell->value;
  }
  const auto& l = old->layout;
  at::Tensor host;
  if (l.untyped) {
    host = old->host.clone();
  } else if (keeps) {
    host = memory_like(l, old->host.as_strided(l.sizes, l.strides, 0));
  } else {
    host = at::empty_strided(l.sizes, l.strides, options_of(l));
  }
  auto fresh = make_value(l, old->nbytes, old->device, State::Host);
  fresh->host = std::move(host);
  Lock lock(g_mutex);
  if (cell->value == old) cell->value = std::move(fresh);
}

at::Tensor alias_of(const at::Tensor& t, const at::Tensor& host) {
  auto alias = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(host.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

// What a result of a CPU kernel becomes: a device tensor whose storage holds the memory.
class Results {
 public:
  explicit Results(int16_t device) : device_(device) {}

  // Memory of an operand is none of a new result's.
  void is_operand(const at::Tensor& alias) {
    operands_.push_back(alias.storage().unsafeGetStorageImpl());
  }

  at::Tensor operator()(at::Tensor t) {
    if (!t.defined()) return {};
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_dense_strided(t), "tpu: an op gave a tensor of layout ", t.layout(),
        ", and device 'tpu' has dense ones alone.");
    if (t.is_conj() || t.is_neg()) t = t.resolve_conj().resolve_neg();
    auto* impl = t.storage().unsafeGetStorageImpl();
    if (std::find(operands_.begin(), operands_.end(), impl) != operands_.end()) {
      t = t.clone();
      impl = t.storage().unsafeGetStorageImpl();
    }
    c10::Storage storage;
    for (const auto& [from, to] : made_)
      if (from == impl) storage = to;
    if (!storage) {
      storage = storage_of(t);
      made_.emplace_back(impl, storage);
    }
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    auto made = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), keys, t.dtype());
    auto* tensor = made.unsafeGetTensorImpl();
    tensor->set_storage_offset(t.storage_offset());
    tensor->set_sizes_and_strides(t.sizes(), t.strides());
    return made;
  }

  // The value of a storage that holds the memory of a CPU tensor.
  ValuePtr value_of(const at::Tensor& t) const {
    const size_t nbytes = t.storage().nbytes();
    const bool is_whole =
        t.storage_offset() == 0 && t.nbytes() == nbytes && is_dense(t.sizes(), t.strides());
    Layout l{t.scalar_type(), {}, {}};
    if (is_whole) {
      l.sizes = Dims(t.sizes().begin(), t.sizes().end());
      l.strides = Dims(t.strides().begin(), t.strides().end());
    } else if (nbytes % t.element_size() == 0) {
      l.sizes = {static_cast<int64_t>(nbytes / t.element_size())};
      l.strides = {1};
    } else {
      l = {at::kByte, {static_cast<int64_t>(nbytes)}, {1}, true};
    }
    auto v = make_value(l, nbytes, device_, State::Host);
    if (is_whole && t.use_count() <= 2) {  // the kernel's and the caller's
      v->host = t;
      return v;
    }
    v->host = at::detail::make_tensor_base<c10::TensorImpl>(
        c10::Storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(l.dtype));
    v->host.unsafeGetTensorImpl()->set_sizes_and_strides(l.sizes, l.strides);
    return v;
  }

 private:
  c10::Storage storage_of(const at::Tensor& t) const {
    const size_t nbytes = t.storage().nbytes();
    if (memory_is_checked()) require_memory(device_, static_cast<int64_t>(nbytes));
    return c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), nbytes, allocate(value_of(t)), device_allocator(),
        true);
  }

  int16_t device_;
  c10::SmallVector<const c10::StorageImpl*, 8> operands_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 2> made_;
};

// An out= tensor takes the geometry that the CPU kernel gave its alias.
void follow(const at::Tensor& t, const at::Tensor& alias, const Results& results) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  const bool moved = alias.storage().nbytes() != storage->nbytes();
  if (!moved && t.sizes() == alias.sizes() && t.strides() == alias.strides()) return;
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_offset(alias.storage_offset());
  impl->set_sizes_and_strides(alias.sizes(), alias.strides());
  if (!moved) return;
  resize_storage(storage, alias.storage().nbytes());
  auto value = results.value_of(alias);
  Lock lock(g_mutex);
  cell_of(storage)->value = std::move(value);
}

struct WrittenTensor {
  at::Tensor original, alias;
};

// Whether a tensor is its storage's value as it lies on the host.
bool is_the_value(const at::Tensor& t, const Value& v) {
  return t.storage_offset() == 0 && t.scalar_type() == v.layout.dtype && !v.layout.untyped &&
      t.sizes() == v.host.sizes() && t.strides() == v.host.strides() &&
      !t.unsafeGetTensorImpl()->is_wrapped_number();
}

// Puts CPU tensors in place of the device's, lists included.
class Aliases {
 public:
  Aliases(Results& results, std::vector<WrittenTensor>& written)
      : results_(results), written_(written) {}

  at::Tensor operator()(const at::Tensor& t, bool is_written) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    for (const auto& w : written_)  // PyTorch asks whether an operand is the result itself
      if (w.original.is_same(t)) return w.alias;
    const auto& v = *cell_of(t)->value;
    if (!is_written && is_the_value(t, v)) {
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
    if (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensor()) {
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

// Marks what a call writes for as long as its kernel runs. Made with g_mutex, ended without.
class Writing {
 public:
  explicit Writing(const Call& c) {
    for (const auto& a : c.writes) {
      ++a.cell->value->writers;
      values_.push_back(a.cell->value);
    }
  }
  Writing(const Writing&) = delete;
  ~Writing() {
    if (values_.empty()) return;
    Lock lock(g_mutex);
    for (const auto& v : values_) --v->writers;
    values_.clear();
    notify_settled();
  }

 private:
  c10::SmallVector<ValuePtr, 2> values_;
};

c10::OperatorName operator_name(const std::string& name) {  // "aten::add.Tensor"
  const auto dot = name.find('.');
  if (dot == std::string::npos) return {name, ""};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

// The CPU op that computes what an overload does, or null where there is none that may stand for it.
const c10::OperatorHandle* host_kernel(const OpDescription& d) {
  auto find = [&]() -> std::optional<c10::OperatorHandle> {
    if (d.name.rfind("aten::", 0) != 0 || d.random || host_function(d)) return {};
    const auto twin = kTwins.find(d.name);
    const auto op = c10::Dispatcher::singleton().findOp(
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
  std::call_once(d.host_sought, [&] { d.host = find(); });
  return d.host ? &*d.host : nullptr;
}

// Whether the CPU's kernel would give a sparse tensor; Python's refusal says what to do.
bool gives_sparse(const OpDescription& d, const c10::IValue* args) {
  return d.name == "aten::_embedding_bag_backward" && args[9].toBool();
}

}  // namespace

void set_tiers(Tiers tiers) { g_tiers = tiers; }
Tiers tiers() {
  // What fits is asked of programs, of which one that does not leaves no trace.
  return memory_is_checked() ? Tiers::Compiled : g_tiers.load(std::memory_order_relaxed);
}

namespace {

// Whether a call of a random op draws anything: dropout of 0 does not.
bool draws(const OpDescription& d, const c10::IValue* args) {
  return d.chance < 0 || args[d.chance].toDouble() != 0;
}

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
  if (kernel_ && gives_sparse(d, args)) kernel_ = nullptr;
  if (!kernel_) function_ = d.random ? host_draw(d, args) : host_function(d);
  if (!function_ && d.chance >= 0 && args[d.chance].toDouble() == 0) function_ = host_function(d);
}

std::optional<torch::jit::Stack> HostCall::run(Call& c, Lock& lock) const {
  const size_t n = d_.policies.size();
  ThreefryKey key{};
  each_access(c, [](Access& a, bool) { a.value.reset(); });
  if (c.device < 0) c.device = current_device();
  if (function_ && d_.random && draws(d_, args_)) {
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
    Aliases aliases(results, written);
    stack.resize(n);
    for (const bool is_written : {true, false})
      for (size_t i = 0; i < n; ++i)
        if (d_.writes[i] == is_written) stack[i] = aliases(args_[i], is_written);
  }
  const bool under_way = ++counters().host_ops == kFirstOps;
  // The line of the backward ops too.
  const Line line = is_profiling() || is_differentiated(c10::ArrayRef<c10::IValue>(args_, n))
      ? user_line()
      : Line{};
  const int64_t started = is_profiling() ? profiler_time() : 0;
  const Writing writing(c);
  lock.unlock();
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    // The kernel's row is the device's: its own calls would count the op twice.
    std::optional<at::DisableRecordFunctionGuard> unrecorded;
    if (started) unrecorded.emplace();
    if (function_) function_(key, stack);
    else kernel_->callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return {};  // of the dtype: a lowering may have it, or raises the same in the device's name
  }
  if (started) note_host_op(d_.name, line, c.device, started);
  if (under_way) {
    py::gil_scoped_acquire gil;
    callback("resume_collector")();
  }
  for (const auto& w : written) follow(w.original, w.alias, results);
  for (size_t i = 0; i < stack.size(); ++i) {
    auto& r = stack[i];
    if (i < d_.returns.size() && d_.returns[i] >= 0) {
      r = args_[d_.returns[i]];
    } else if (r.isTensor()) {
      r = results(std::move(r).toTensor());
    } else if (r.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : r.toTensorVector()) list.push_back(results(t));
      r = std::move(list);
    }
  }
  return stack;
}

at::Tensor memory_like(const Layout& l, const at::Tensor& values) {
  if (is_dense(l.sizes, l.strides)) {
    auto host = at::empty_strided(l.sizes, l.strides, options_of(l));
    return values.defined() ? host.copy_(values) : host.zero_();
  }
  // Elements that share a place, as those of an expanded result, cannot be written by way of the layout.
  int64_t n = 1;
  for (size_t i = 0; i < l.sizes.size(); ++i) {
    if (l.sizes[i] == 0) n = 0;
    if (n) n += (l.sizes[i] - 1) * l.strides[i];
  }
  auto flat = at::zeros({n}, options_of(l));
  if (values.defined() && n)
    flat.index_put_({at::arange(n, at::kLong).as_strided(l.sizes, l.strides)}, values);
  return flat.as_strided(l.sizes, l.strides);
}

at::Tensor host_alias(const at::Tensor& t, bool written) {
  refuse_in_capture(static_cast<int16_t>(t.device().index()), "An op of the host");
  Cell* cell = cell_of(t);
  ValuePtr v;
  {
    Lock lock(g_mutex);
    settle_type(*cell->value, t);
    v = cell->value;
    if (v->state != State::Uninitialized) settle(v, lock, kForHost);
    v = cell->value;
  }
  bring_to_host(v);
  v.reset();
  if (written) make_exclusive(cell, true);
  Lock lock(g_mutex);
  return alias_of(t, cell->value->host);
}

}  // namespace tpu

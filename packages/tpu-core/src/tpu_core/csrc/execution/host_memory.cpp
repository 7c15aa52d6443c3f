#include "execution/host_memory.h"

#include "recorder/capture.h"
#include "recorder/tensors.h"
#include "recorder/trace.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

namespace tpu {
namespace {

bool is_dense_strided(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_quantized() && !t.is_nested();
}

at::TensorOptions options_of(const Layout& l) { return at::TensorOptions().dtype(l.dtype); }

c10::Storage storage_with(ValuePtr value) {
  const size_t nbytes = value->nbytes;
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, allocate(std::move(value)), device_allocator(),
      true);
}

// A device tensor on a storage that lies there as a CPU tensor.
at::Tensor tensor_like(const at::Tensor& t, c10::Storage storage) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto made = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), keys, t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  if (t.is_contiguous() && t.storage_offset() == 0) {
    impl->set_sizes_contiguous(t.sizes());
    if (C10_LIKELY(made.strides() == t.strides())) return made;  // dims of 1 may have any stride
  }
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  return made;
}

}  // namespace

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

bool is_the_value(const at::Tensor& t, const Value& v) {
  return t.storage_offset() == 0 && t.scalar_type() == v.layout.dtype && !v.layout.untyped &&
      t.sizes() == v.host.sizes() && t.strides() == v.host.strides() &&
      !t.unsafeGetTensorImpl()->is_wrapped_number();
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

ValuePtr value_of_memory(at::Tensor& t, int16_t device) {
  const size_t nbytes = t.storage().nbytes();
  const bool is_whole = t.storage_offset() == 0 && t.nbytes() == nbytes &&
      (t.is_contiguous() || is_dense(t.sizes(), t.strides()));
  // Held by a list and the caller.
  if (is_whole && t.use_count() <= 2) return make_host_value(std::move(t), nbytes, device);
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
  auto v = make_value(l, nbytes, device, State::Host);
  v->host = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(l.dtype));
  v->host.unsafeGetTensorImpl()->set_sizes_and_strides(l.sizes, l.strides);
  return v;
}

at::Tensor device_tensor(at::Tensor t, int16_t device) {
  if (memory_is_checked()) require_memory(device, static_cast<int64_t>(t.storage().nbytes()));
  auto value = value_of_memory(t, device);
  const Value& kept = *value;
  auto storage = storage_with(std::move(value));
  return tensor_like(t.defined() ? t : kept.host, std::move(storage));
}

at::Tensor Results::operator()(at::Tensor t) {
  if (!t.defined()) return {};
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_dense_strided(t), "tpu: an op gave a tensor of layout ", t.layout(),
      ", and device 'tpu' has dense ones alone.");
  if (t.is_conj() || t.is_neg()) t = t.resolve_conj().resolve_neg();
  if (t._is_zerotensor()) t = at::zeros(t.sizes(), t.options());  // it has no memory
  const auto* impl = t.storage().unsafeGetStorageImpl();
  if (std::find(operands_.begin(), operands_.end(), impl) != operands_.end()) {
    t = t.clone();
    impl = t.storage().unsafeGetStorageImpl();
  }
  for (const auto& [from, storage] : made_)
    if (from == impl) return tensor_like(t, storage);
  auto made = device_tensor(std::move(t), device_);
  made_.emplace_back(impl, made.storage());
  return made;
}

void Results::replace(
    c10::IValue* results, size_t n, const std::vector<int>& returns, const c10::IValue* args) {
  for (size_t i = 0; i < n; ++i) {
    auto& r = results[i];
    if (i < returns.size() && returns[i] >= 0) {
      r = args[returns[i]];
    } else if (r.isTensor()) {
      r = (*this)(std::move(r).toTensor());
    } else if (r.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : r.toTensorVector()) list.push_back((*this)(t));
      r = std::move(list);
    }
  }
}

Writing::~Writing() {
  if (!is_marked_) return;
  Lock lock(g_mutex);
  for (const auto& v : values_) --v->writers;
  values_.clear();
  notify_settled();
}

}  // namespace tpu

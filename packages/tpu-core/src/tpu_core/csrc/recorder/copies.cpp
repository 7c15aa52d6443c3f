#include "execution/direct_call.h"
#include "execution/profiler.h"
#include "execution/program.h"
#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/record.h"
#include "recorder/tensors.h"
#include "recorder/trace.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_to_copy_native.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

namespace tpu {

namespace {
std::atomic<uint64_t> g_uploads{0}, g_uploaded_bytes{0};
}

void count_host_to_device(size_t nbytes) {
  ++g_uploads;
  g_uploaded_bytes += nbytes;
}

std::pair<uint64_t, uint64_t> host_to_device_counts() { return {g_uploads, g_uploaded_bytes}; }

namespace {

// A contiguous CPU copy in the dtype of the destination; XLA never sees memory that the user can write.
at::Tensor host_copy(const at::Tensor& cpu, at::ScalarType dtype) {
  return at::empty(cpu.sizes(), cpu.options().dtype(dtype).pinned_memory(false)).copy_(cpu);
}

void copy_from_host(const at::Tensor& self, const at::Tensor& src) {
  const auto device = static_cast<int16_t>(self.device().index());
  refuse_in_capture(device, "A copy from the host");
  if (is_pinned(src.const_data_ptr())) {  // an earlier copy may still have to write it
    py::gil_scoped_acquire gil;
    callback("finish_host_copies")();
  }
  auto* cell = cell_of(self);
  count_host_to_device(self.nbytes());
  if (!whole_storage(self)) {
    self.copy_(to_device(src.expand(self.sizes()), device));
    return;
  }
  const int64_t started = transfer_time();
  auto host = host_copy(src.expand(self.sizes()), self.scalar_type());
  Layout layout;
  if (is_bytes(self)) {
    // Bytes of a checkpoint: they keep the type that the storage already has, or wait for one.
    layout = cell->value->layout;
    const bool larger = cell->value->nbytes != self.nbytes();  // the storage was shrunk
    if (larger || (layout.dtype == at::kByte && layout.sizes.size() == 1))
      layout = {at::kByte, {static_cast<int64_t>(self.nbytes())}, {1}, true};
    if (!layout.untyped) host = typed_host(host, layout);
  } else {
    layout = {
        self.scalar_type(), Dims(self.sizes().begin(), self.sizes().end()),
        Dims(self.strides().begin(), self.strides().end())};
  }
  auto value = make_value(layout, self.nbytes(), device, State::Host);
  value->host = std::move(host);
  note_transfer(true, static_cast<int64_t>(self.nbytes()), device, started);
  WithoutGil no_gil;
  Lock lock(g_mutex);
  cell->value = std::move(value);
}

// Storages may share a value until one is written, unless that would change its dims ([1, n] to [n]).
bool share_value(const at::Tensor& self, const at::Tensor& src) {
  if (is_capturing(static_cast<int16_t>(self.device().index())))
    return false;  // it is an op of the graph
  if (self.device() != src.device() || self.scalar_type() != src.scalar_type() ||
      self.sizes() != src.sizes() || self.strides() != src.strides())
    return false;
  if (!whole_storage(self) || !whole_storage(src)) return false;
  WithoutGil no_gil;
  Lock lock(g_mutex);
  auto& value = cell_of(src)->value;
  const bool fits = value && value->nbytes == self.storage().nbytes() &&
      (value->layout.untyped || self.sizes() == at::IntArrayRef(value->layout.sizes));
  if (!fits) return false;
  auto* cell = cell_of(self);
  if (value->state == State::Pending && value->trace)
    remember_former(value->trace->current, *value->trace, cell, value.get());
  cell->value = value;
  return true;
}

at::Tensor copy_between_devices(const at::Tensor& src, int16_t device) {
  refuse_in_capture(static_cast<int16_t>(src.device().index()), "A copy to another device");
  refuse_in_capture(device, "A copy from another device");
  auto contiguous = src.contiguous();
  ValuePtr value;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    value = cell_of(contiguous)->value;
    if (value->state != State::Uninitialized) settle(value, lock, "copy to another device");
  }
  auto out = make_empty(src.sizes(), contiguous.strides(), src.scalar_type(), device);
  if (value->state == State::Uninitialized) return out;
  if (value->state == State::Host) {
    out.copy_(value->host);
    return out;
  }
  py::gil_scoped_acquire gil;
  py::object moved = callback("move")(device_array(*value), device);
  auto* target = cell_of(out)->value.get();
  target->set_array(moved.release().ptr());
  return out;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  TORCH_CHECK(
      !self._is_zerotensor(),
      "ZeroTensors are immutable. Please materialize the tensor using `.clone()`, if you want a "
      "mutable zero tensor.");
  // PyTorch leaves the lazy conjugate and negative bits of a copy to the backend.
  if (src.is_conj()) return copy_(self, at::conj_physical(src.conj()), non_blocking);
  if (src.is_neg()) return copy_(self, at::neg(src._neg_view()), non_blocking);
  if (self.is_conj()) {
    auto plain = self.conj();
    copy_(plain, at::conj_physical(src.to(self.scalar_type())), non_blocking);
    return self;
  }
  if (self.is_neg()) {
    auto plain = self._neg_view();
    copy_(plain, at::neg(src), non_blocking);
    return self;
  }
  ensure_initialized();
  TORCH_CHECK(self.defined() && src.defined(), "tpu: copy_ of an undefined tensor");
  at::assert_no_internal_overlap(self);
  at::assert_no_partial_overlap(self, src);
  if (self.sizes() != src.sizes()) {
    const auto shape = at::infer_size(self.sizes(), src.sizes());
    TORCH_CHECK(
        self.sizes() == at::IntArrayRef(shape), "output with shape ", self.sizes(),
        " doesn't match the broadcast shape ", at::IntArrayRef(shape));
  }
  // A reference to a tensor that Python holds is counted under the GIL.
  const auto operand = src.sizes() == self.sizes()
      ? c10::MaybeOwned<at::Tensor>::borrowed(src)
      : c10::MaybeOwned<at::Tensor>::owned(src.expand(self.sizes()));
  const at::Tensor& expanded = *operand;
  if (self.numel() == 0) return self;
  const bool to = self.is_privateuseone(), from = src.is_privateuseone();
  if (to && from) {
    if (self.device() != src.device())
      return copy_(self, copy_between_devices(expanded, self.device().index()), non_blocking);
    if (share_value(self, expanded)) return self;
    record_copy(self, expanded, non_blocking);
  } else if (to) {
    TORCH_CHECK(
        src.is_cpu(), "tpu: cannot copy from a tensor on ", src.device(),
        "; move it to the CPU first.");
    copy_from_host(self, expanded);
  } else {
    TORCH_CHECK(
        self.is_cpu(), "tpu: cannot copy to a tensor on ", self.device(), "; go through the CPU.");
    if (non_blocking && copy_to_pinned(self, expanded)) return self;
    self.copy_(read_tensor(expanded, "copy to the host"));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto target = dst;
  return copy_(target, self, non_blocking);
}

// `_to_copy` on the CPU, which for few bytes costs more than the copy.
at::Tensor copy_on_host(
    const at::Tensor& cpu, std::optional<at::ScalarType> dtype,
    std::optional<at::MemoryFormat> format) {
  constexpr size_t kFewBytes = 1 << 16;
  const auto f = format.value_or(at::MemoryFormat::Preserve);
  const bool is_kept = dtype.value_or(cpu.scalar_type()) == cpu.scalar_type() &&
      (f == at::MemoryFormat::Preserve || f == at::MemoryFormat::Contiguous);
  if (is_kept && cpu.is_contiguous() && cpu.nbytes() <= kFewBytes) {
    at::Tensor copy = at::detail::empty_cpu(cpu.sizes(), cpu.scalar_type());
    if (copy.strides() == cpu.strides()) {  // dims of 1 may have others
      std::memcpy(copy.mutable_data_ptr(), cpu.const_data_ptr(), cpu.nbytes());
      return copy;
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  return at::native::_to_copy(cpu, dtype, {}, c10::Device(c10::kCPU), {}, false, format);
}

// A copy in device memory of a CPU tensor: what `_to_copy` gives on the CPU becomes the new storage's memory.
at::Tensor upload(
    const at::Tensor& cpu, std::optional<at::ScalarType> dtype, int16_t device,
    std::optional<at::MemoryFormat> format) {
  ensure_initialized();
  refuse_in_capture(device, "A copy from the host");
  const int64_t started = transfer_time();
  auto host = copy_on_host(cpu, dtype, format);
  count_host_to_device(host.nbytes());
  note_transfer(true, static_cast<int64_t>(host.nbytes()), device, started);
  return device_tensor(std::move(host), device);
}

// A device tensor's copy on the CPU; undefined where its geometry is not that of the memory that was read.
at::Tensor download(
    const at::Tensor& self, std::optional<at::ScalarType> dtype,
    std::optional<at::MemoryFormat> format) {
  const auto host = read_tensor(self, "copy to the host");
  if (host.strides() != self.strides()) return {};
  return copy_on_host(host, dtype, format);
}

// PyTorch pins the result of a copy to the CPU that need not be waited for, and programs read it without
// waiting all the same. Who wants to go on meanwhile copies into pinned memory of their own.
at::Tensor to_copy(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
    std::optional<at::MemoryFormat> format) {
  const bool to_host = device && device->is_cpu();
  const bool is_plain = layout.value_or(at::kStrided) == at::kStrided &&
      !pin_memory.value_or(false) && self.defined() && is_plain_tensor(self) && self.numel();
  if (is_plain && device && device->is_privateuseone() && self.is_cpu()) {
    const auto index = device_index(device);
    // An earlier copy to pinned memory may still have to write it.
    if (!is_pinned(self.const_data_ptr())) return upload(self, dtype, index, format);
  }
  if (is_plain && to_host && self.is_privateuseone() && tiers() != Tiers::Compiled) {
    if (auto host = download(self, dtype, format); host.defined()) return host;
  }
  return at::native::_to_copy(
      self, dtype, layout, device, pin_memory, non_blocking && !to_host, format);
}

}  // namespace

at::Tensor to_device(const at::Tensor& cpu, int16_t device) {
  auto contiguous = cpu.contiguous();
  auto out = make_empty(cpu.sizes(), contiguous.strides(), cpu.scalar_type(), device);
  if (cpu.numel()) copy_from_host(out, contiguous);
  return out;
}

at::Tensor own_value(const at::Tensor& t) {
  return own_value(t, c10::contiguous_strides(t.sizes()));
}

at::Tensor own_value(const at::Tensor& t, at::IntArrayRef strides) {
  auto out =
      make_empty(t.sizes(), strides, t.scalar_type(), static_cast<int16_t>(t.device().index()));
  if (t.numel()) record_copy(out, t, false);
  return out;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_to_copy", &to_copy);
}

}  // namespace tpu

#include "recorder/tensors.h"

#include "execution/direct_call.h"
#include "execution/profiler.h"
#include "execution/program.h"
#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/record.h"
#include "recorder/trace.h"
#include "runtime/torch_compat.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

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

int16_t device_index(std::optional<at::Device> device) {
  if (device_count() == 0) ensure_initialized();  // raises, and says why there is none
  const int16_t index = device && device->has_index() ? device->index() : current_device();
  TORCH_CHECK(
      index < device_count(), "tpu: device index ", index, " is out of range; there are ",
      device_count(), " devices (TPU_NUM_DEVICES sets the number on the CPU platform).");
  return index;
}

at::Tensor make_empty(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int16_t device,
    c10::DispatchKeySet keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
  ensure_initialized();
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  const size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, meta.itemsize());
  Layout layout{dtype, Dims(sizes.begin(), sizes.end()), Dims(strides.begin(), strides.end())};
  if (!is_dense(sizes, strides))
    layout = {dtype, {static_cast<int64_t>(nbytes / meta.itemsize())}, {1}};
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, allocate(nbytes, device, layout),
      device_allocator(), true);
  auto t = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), keys, meta);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

// The same for the user, who is told where there is too little.
at::Tensor new_memory(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int16_t device) {
  if (memory_is_checked()) {
    const size_t itemsize = c10::elementSize(dtype);
    require_memory(
        device, static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, itemsize)));
  }
  return make_empty(sizes, strides, dtype, device);
}

void check_sizes(at::IntArrayRef sizes) {
  for (auto s : sizes)
    TORCH_CHECK(s >= 0, "Trying to create tensor with negative dimension ", s, ": ", sizes);
}

at::Tensor empty_memory_format(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  check_sizes(sizes);
  TORCH_CHECK(
      layout.value_or(at::kStrided) == at::kStrided, "tpu: layout ", *layout, " is not supported.");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  Dims strides = c10::contiguous_strides(sizes);
  const auto f = format.value_or(at::MemoryFormat::Contiguous);
  if (f == at::MemoryFormat::ChannelsLast || f == at::MemoryFormat::ChannelsLast3d) {
    const bool two = f == at::MemoryFormat::ChannelsLast;
    TORCH_CHECK(
        static_cast<int64_t>(sizes.size()) == (two ? 4 : 5), "required rank ", two ? 4 : 5,
        " tensor to use ", two ? "channels_last" : "channels_last_3d", " format");
    const auto last =
        two ? c10::get_channels_last_strides_2d(sizes) : c10::get_channels_last_strides_3d(sizes);
    strides = Dims(last.begin(), last.end());
  } else {
    TORCH_CHECK(
        f != at::MemoryFormat::Preserve,
        "memory format option is only supported by strided tensors");
  }
  return new_memory(
      sizes, strides, dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype())),
      device_index(device));
}

// Zeros of which PyTorch's own rules know: forward derivatives leave them out, even beside infinities. What has
// no such rule reads memory that was never written, which is zeros.
at::Tensor efficient_zero_tensor(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  check_sizes(sizes);
  return make_empty(
      sizes, c10::contiguous_strides(sizes),
      dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype())), device_index(device),
      c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}));
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  check_sizes(sizes);
  return new_memory(
      sizes, strides, dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype())),
      device_index(device));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

bool whole_storage(const at::Tensor& t) {
  return t.storage_offset() == 0 && is_dense(t.sizes(), t.strides()) &&
      static_cast<size_t>(t.numel()) * t.element_size() == t.storage().nbytes();
}

bool is_bytes(const at::Tensor& t) {
  return t.scalar_type() == at::kByte && t.dim() == 1 && t.is_contiguous();
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (strides.data() || sizes.empty()) {
    // Raises for negative strides, which the setter would replace.
    if (std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s < 0; }))
      at::detail::computeStorageNbytes(sizes, strides, self.element_size(), offset);
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  const auto needed =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), offset);
  if (self.numel() && needed > self.storage().nbytes())
    resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  // The tensor that is rebuilt on loaded bytes says what they are, before a view of it is used.
  if (self.numel() && whole_storage(self) && !is_bytes(self)) {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    settle_type(*cell_of(self)->value, self);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto n = static_cast<int64_t>(source.nbytes() / self.element_size());
  const std::array<int64_t, 1> sizes{n}, strides{1};
  return set_storage_offset(self, std::move(source), 0, sizes, strides);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage_offset(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  auto fresh = make_empty({0}, {1}, self.scalar_type(), self.device().index());
  return set_tensor(self, fresh);
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes || format) {
    impl->set_sizes_contiguous(sizes);
    if (format) impl->empty_tensor_restride(*format);
    const auto needed = at::detail::computeStorageNbytes(
        self.sizes(), self.strides(), self.element_size(), self.storage_offset());
    if (self.numel() && needed > self.storage().nbytes())
      resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  }
  return self;
}

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

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::native::_local_scalar_dense_cpu(read_tensor(self, "item"));
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(
      self.device() == other.device(),
      "Expected all tensors to be on the same device, but found at least two devices, ",
      self.device(), " and ", other.device(), "!");
  if (self.sizes() != other.sizes()) return false;
  if (self.numel() == 0) return true;
  return self.eq(other).all().item<bool>();
}

bool is_set_to(const at::Tensor& self, const at::Tensor& src) {
  return self.storage().unsafeGetStorageImpl() == src.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == src.storage_offset() && self.sizes() == src.sizes() &&
      self.strides() == src.strides();
}

// The default lists the dense devices of PyTorch itself, without which `Module.to` would make a new
// Parameter for each reference and untie shared weights.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && (t.is_cpu() || t.is_privateuseone()) &&
        !t.unsafeGetTensorImpl()->is_python_dispatch();
  };
  return dense(self) && dense(from);
}

// Checks and length as of ATen (RangeFactories.cpp): values in the accumulating dtype of the result, the
// length in int64 for int64 (but see `kRangesHaveLengthsAsGiven`) and in double for all others.
at::Tensor& arange_out(
    const at::Scalar& start, const at::Scalar& end, const at::Scalar& step, at::Tensor& out) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      out.scalar_type() != at::kBool, "\"arange_tpu\" not implemented for 'Bool'");
  const auto s = start.toDouble(), e = end.toDouble(), d = step.toDouble();
  TORCH_CHECK(d != 0, "step must be nonzero");
  TORCH_CHECK(std::isfinite(s) && std::isfinite(e), "unsupported range: ", s, " -> ", e);
  TORCH_CHECK(
      (d > 0 && e >= s) || (d < 0 && e <= s),
      "upper bound and lower bound inconsistent with step sign");
  double length = std::ceil((e - s) / d);
  at::Scalar first = start, by = step;
  if (at::isIntegralType(out.scalar_type(), false)) {
    const auto from = start.to<int64_t>(), to = end.to<int64_t>(), stride = step.to<int64_t>();
    first = from, by = stride;
    const bool has_float =
        start.isFloatingPoint() || end.isFloatingPoint() || step.isFloatingPoint();
    if (out.scalar_type() == at::kLong && !(kRangesHaveLengthsAsGiven && has_float)) {
      TORCH_CHECK_VALUE(stride != 0, "step must be nonzero");
      length = static_cast<double>((to - from + stride - (stride > 0 ? 1 : -1)) / stride);
    }
  }
  TORCH_CHECK(
      length >= 0 && length <= static_cast<double>(std::numeric_limits<int64_t>::max()),
      "invalid size, possible overflow?");
  const auto n = static_cast<int64_t>(length);
  if (out.numel() != n) at::native::resize_output(out, {n});
  if (out.dim() != 1 && !out.is_contiguous()) {
    auto flat = at::empty({n}, out.options());
    arange_out(start, end, step, flat);
    return out.copy_(flat.view(out.sizes()));
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tpu::arange_", "");
  static auto* description = describe_op(op);
  torch::jit::Stack stack{out.dim() == 1 ? out : out.view(-1), first, by};
  record(*description, op, &stack);
  return out;
}

void record_stream(at::Tensor&, at::Stream) {}  // one ordered queue a device

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
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", [](const at::Tensor& t, at::IntArrayRef s) { return at::native::view(t, s); });
  m.impl("_reshape_alias", [](const at::Tensor& t, at::IntArrayRef s, at::IntArrayRef st) {
    return at::native::_reshape_alias(t, s, st);
  });
  m.impl("unfold", [](const at::Tensor& t, int64_t d, int64_t size, int64_t step) {
    return at::native::unfold(t, d, size, step);
  });
  m.impl("view_as_real", [](const at::Tensor& t) { return at::native::view_as_real(t); });
  m.impl("view_as_complex", [](const at::Tensor& t) { return at::native::view_as_complex(t); });
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_to_copy", &to_copy);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("equal", &equal);
  m.impl("is_set_to", &is_set_to);
  m.impl("arange.start_out", &arange_out);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

TORCH_LIBRARY(tpu, m) {
  // `arange` with start and step as run-time inputs: only the length is part of the program.
  m.def("arange_(Tensor(a!) self, Scalar start, Scalar step) -> Tensor(a!)");
}

}  // namespace tpu

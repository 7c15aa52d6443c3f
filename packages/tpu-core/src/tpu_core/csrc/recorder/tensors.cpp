#include "recorder/tensors.h"

#include "execution/host_kernels.h"
#include "execution/program.h"
#include "recorder/call.h"
#include "recorder/record.h"
#include "recorder/trace.h"
#include "runtime/torch_compat.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tpu {

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
    c10::DispatchKeySet keys) {
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

bool whole_storage(const at::Tensor& t) {
  return t.storage_offset() == 0 && is_dense(t.sizes(), t.strides()) &&
      static_cast<size_t>(t.numel()) * t.element_size() == t.storage().nbytes();
}

bool is_bytes(const at::Tensor& t) {
  return t.scalar_type() == at::kByte && t.dim() == 1 && t.is_contiguous();
}

namespace {

// Memory of a factory: raises where the device has too little.
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

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
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
  return self;  // NOLINT(bugprone-return-const-ref-from-parameter): ATen's signature
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
  if (tiers() != Tiers::Compiled)  // the memory is the host's
    return at::equal(read_tensor(self, "item"), read_tensor(other, "item"));
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
      const int64_t count = (to - from + stride - (stride > 0 ? 1 : -1)) / stride;
      length = static_cast<double>(count);
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
  static KnownDescription description;
  torch::jit::Stack stack{out.dim() == 1 ? out : out.view(-1), first, by};
  record(description.of(op), op, &stack);
  return out;
}

void record_stream(at::Tensor&, at::Stream) {}  // one ordered queue a device

}  // namespace

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

// Reads of device values by the host.
#include "execution/host_kernels.h"
#include "execution/host_memory.h"
#include "execution/profiler.h"
#include "execution/program.h"
#include "recorder/capture.h"
#include "recorder/checks.h"
#include "recorder/tensors.h"
#include "recorder/trace.h"
#include "runtime/python.h"
#include "values/memory.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tpu {
namespace {

// The memory of an array that is on the CPU, by Python's buffer protocol; waits for it. Undefined where
// the array has none, where the protocol does not know its dtype, and where it could not be computed.
at::Tensor memory_of(py::handle array, const Layout& l) {
  if (!PyObject_CheckBuffer(array.ptr())) return {};
  auto memory = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(array.ptr()));
  if (!memory) {
    PyErr_Clear();
    return {};
  }
  const auto& view = *PyMemoryView_GET_BUFFER(memory.ptr());
  const auto nbytes = numel_of(l.sizes) * static_cast<int64_t>(c10::elementSize(l.dtype));
  if (view.len != nbytes || !PyBuffer_IsContiguous(&view, 'C')) return {};
  auto drop = [owned = memory.release().ptr(), nbytes](void*) { release_reference(owned, nbytes); };
  return at::from_blob(view.buf, l.sizes, drop, at::TensorOptions().dtype(l.dtype));
}

// A value's memory on the host; undefined where it is an array's.
at::Tensor held_on_host(const Value& value) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  return value.state == State::Host ? value.host : at::Tensor();
}

// What a value holds, on the host; waits for it.
at::Tensor read_array(Value& value, const char* reason) {
  if (auto host = held_on_host(value); host.defined()) return host;
  py::gil_scoped_acquire gil;
  const auto array = device_array(value);
  if (handles_signals()) callback("wait_for")(array);
  if (is_profiling()) callback("wait_until_ready")(array);  // the wait is none of the transfer
  const int64_t started = transfer_time();
  auto memory = memory_of(array, value.layout);
  if (!memory.defined()) {
    memory = callback("to_host")(array, reason).cast<at::Tensor>();
    note_transfer(false, static_cast<int64_t>(memory.nbytes()), value.device, started);
    return memory;
  }
  note_transfer(false, static_cast<int64_t>(memory.nbytes()), value.device, started);
  callback("note_read")(array, reason, memory.nbytes());
  return memory;
}

// The elements of a settled value in memory order, on the host.
at::Tensor read_elements(Value& value, const char* reason) {
  if (value.state == State::Uninitialized)
    return at::zeros({static_cast<int64_t>(value.nbytes)}, at::kByte);
  const auto& l = value.layout;
  const auto host = read_array(value, reason);
  if (!l.untyped && !is_dense(l.sizes, l.strides)) {  // some share a place
    const auto memory = memory_like(l, host);
    return memory.as_strided(
        {static_cast<int64_t>(memory.storage().nbytes() / memory.itemsize())}, {1}, 0);
  }
  if (l.untyped || at::IntArrayRef(l.strides) == host.strides())
    return host.as_strided({host.numel()}, {1});
  // Dims in order of falling stride are the order of memory.
  std::vector<int64_t> order(l.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(
      order.begin(), order.end(), [&](auto a, auto b) { return l.strides[a] > l.strides[b]; });
  return host.permute(order).contiguous().view({-1});
}

// Bytes as elements of a dtype; those at the end that make no whole element are left out.
at::Tensor elements(const at::Tensor& bytes, at::ScalarType dtype) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, bytes.numel() / size * size).view(dtype);
}

// What a CPU kernel made knows of no launch: it had waited for its operands.
void raise_checks_of(const Value& value) {
  const bool is_kernels = value.state == State::Host && tiers() != Tiers::Compiled;
  raise_checks(value.device, is_kernels ? launches() : value.launch);
}

// A graph that is captured does not run, so that its results are not there to be read.
void refuse_read(int16_t device, const char* reason) {
  if (!any_captures()) return;
  refuse_in_capture(device, ("A read of the device (" + std::string(reason) + ")").c_str());
}

// A tensor on the host whose value is settled.
at::Tensor read_settled(const at::Tensor& t, Value& value, const char* reason) {
  const auto& l = value.layout;
  const bool whole = t.scalar_type() == l.dtype && t.storage_offset() == 0 &&
      t.sizes() == at::IntArrayRef(l.sizes) && t.strides() == at::IntArrayRef(l.strides);
  if (const auto host = held_on_host(value); host.defined()) {
    note_transfer(false, static_cast<int64_t>(t.nbytes()), value.device, transfer_time());
    if (!l.untyped && t.scalar_type() == l.dtype && is_in_memory_order(host, l))
      return whole ? host : alias_of(t, host);
  }
  if (whole && value.state != State::Uninitialized) return read_array(value, reason);
  auto host = read_elements(value, reason);
  if (host.scalar_type() != t.scalar_type()) host = elements(host.view(at::kByte), t.scalar_type());
  return host.as_strided(t.sizes(), t.strides(), t.storage_offset());
}

}  // namespace

at::Tensor typed_host(const at::Tensor& bytes, const Layout& layout) {
  return elements(bytes, layout.dtype).as_strided(layout.sizes, layout.strides).contiguous();
}

at::Tensor host_memory(const ValuePtr& value) {
  py::gil_scoped_acquire gil;
  const auto array = without_padding(*value, device_array(*value));
  if (handles_signals()) callback("wait_for")(array);
  auto memory = memory_of(array, value->layout);
  return memory.defined() ? memory : callback("host_memory")(array).cast<at::Tensor>();
}

at::Tensor read_bytes(const ValuePtr& value, const char* reason) {
  ensure_initialized();
  refuse_read(value->device, reason);
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    end_host_segment(value->device);
    if (value->state != State::Uninitialized) settle(value, lock, reason);
  }
  auto bytes = read_elements(*value, reason).view(at::kByte);
  raise_checks_of(*value);
  return bytes;
}

at::Tensor read_tensor(const at::Tensor& t, const char* reason) {
  if (t.numel() == 0) return at::empty(t.sizes(), t.options().device(at::kCPU));
  ensure_initialized();
  refuse_read(static_cast<int16_t>(t.device().index()), reason);
  ValuePtr value;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    value = cell_of(t)->value;
    end_host_segment(value->device);
    if (value->state != State::Uninitialized) settle(value, lock, reason);
  }
  auto host = read_settled(t, *value, reason);
  raise_checks_of(*value);
  return host;
}

py::object array_of_value(const ValuePtr& value, const char* reason) {
  refuse_read(value->device, reason);
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    if (value->state != State::Uninitialized) settle(value, lock, reason);
  }
  return without_padding(*value, device_array(*value));
}

bool copy_to_pinned(const at::Tensor& host, const at::Tensor& t) {
  if (!is_pinned(host.const_data_ptr())) return false;
  ensure_initialized();
  refuse_read(static_cast<int16_t>(t.device().index()), "copy to pinned memory");
  const auto whole = own_value(t);  // shares the value where it is whole
  ValuePtr value;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    value = cell_of(whole)->value;
    if (value->state != State::Uninitialized) settle(value, lock, "copy to pinned memory");
    if (value->state != State::Ready) return false;
    value->shared = true;  // whatever is recorded from now on must leave it alone
  }
  py::gil_scoped_acquire gil;
  callback("copy_to_pinned")(device_array(*value), host, value->device);
  return true;
}

}  // namespace tpu

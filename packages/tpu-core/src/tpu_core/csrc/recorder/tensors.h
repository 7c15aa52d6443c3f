// Tensors that need more than recording: factories, views and storage swaps (tensors.cpp), copies
// (copies.cpp), host reads (reads.cpp).
#pragma once

#include "runtime/python.h"
#include "values/value.h"

namespace tpu {

// The index that a factory's device means.
int16_t device_index(std::optional<at::Device> device);
// A tensor on memory that nothing has written; the dispatcher's keys tell what PyTorch may know of it.
at::Tensor make_empty(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int16_t device,
    c10::DispatchKeySet keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
// Whether a tensor shows each byte of its storage once.
bool whole_storage(const at::Tensor& t);
// Whether a tensor is a storage's bytes, as a checkpoint has them.
bool is_bytes(const at::Tensor& t);
// A CPU tensor's contents as a new device tensor (a copy is taken at once).
at::Tensor to_device(const at::Tensor& cpu, int16_t device);
// Untyped host bytes as a contiguous tensor of a layout's dtype and logical shape.
at::Tensor typed_host(const at::Tensor& bytes, const Layout& layout);
// The storage's bytes in memory order, on the host; waits for the value.
at::Tensor read_bytes(const ValuePtr& value, const char* reason);
void count_host_to_device(size_t nbytes);
std::pair<uint64_t, uint64_t> host_to_device_counts();  // copies, bytes
// A device tensor's value as a CPU tensor of the same shape; waits for it.
at::Tensor read_tensor(const at::Tensor& t, const char* reason);
// The memory of a value's array on the CPU platform, or a copy; waits for it. Not to be written.
at::Tensor host_memory(const ValuePtr& value);
// A value as a jax.Array, which is made of one that is still on the host; what failed is raised. Needs the GIL.
py::object array_of_value(const ValuePtr& value, const char* reason);
// Begins a copy of a device tensor to pinned memory that ends before the device's next synchronisation;
// false where there is nothing to wait for or `host` is not pinned.
bool copy_to_pinned(const at::Tensor& host, const at::Tensor& t);
// A contiguous copy whose storage's value has the tensor's own shape, whatever that of `t` has.
at::Tensor own_value(const at::Tensor& t);
// The same with these strides.
at::Tensor own_value(const at::Tensor& t, at::IntArrayRef strides);

}  // namespace tpu

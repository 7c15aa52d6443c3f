// What a storage holds.
//
// A Cell is the context of a storage's DataPtr and points at the storage's current Value. A Value is
// immutable: an op that writes makes a new one and swaps the Cell's pointer, so two storages may share
// a Value until one of them is written. A Value is a device array, bytes that are still on the host,
// nothing yet (uninitialised memory), or the result of an op that was recorded and has not run.
#pragma once

#include "runtime/locks.h"

#include <Python.h>

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

namespace tpu {

using Dims = at::DimVector;

struct Trace;

enum class State : uint8_t { Uninitialized, Host, Pending, Running, Ready, Failed };

// How the elements of a Value lie in its storage: element (i, j, ...) of an array of `sizes` is at
// offset sum(i * stride). `untyped` marks bytes whose first typed use decides the rest.
struct Layout {
  at::ScalarType dtype = at::kByte;
  Dims sizes;
  Dims strides;
  bool untyped = false;
};

// Why a value could not be computed: a Python exception, raised again by every read of the value.
struct Failure {
  explicit Failure(PyObject* owned) : exception(owned) {}
  Failure(const Failure&) = delete;
  ~Failure();
  [[noreturn]] void raise() const;

  PyObject* exception;
};

struct Value final : c10::intrusive_ptr_target {
  explicit Value(const Layout& l) : layout(l) {}
  Value(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides)
      : layout{dtype, Dims(sizes.begin(), sizes.end()), Dims(strides.begin(), strides.end())} {}

  Layout layout;
  size_t nbytes = 0;
  int16_t device = 0;
  State state = State::Uninitialized;
  bool shared = false;        // handed to or received from the user's JAX code: never donated
  bool accounted = false;     // counted in the device's memory statistics
  bool borrowed = false;      // Host: the memory is an array's, and not to be written
  PyObject* array = nullptr;  // Ready: a jax.Array, owned
  // Host: a CPU tensor of the layout's sizes, contiguous or with its strides (flat and uint8 if untyped).
  at::Tensor host;
  Trace* trace = nullptr;  // Pending or Running: the trace that makes it
  uint64_t stamp = 0;      // the trace segment that `slot` is valid in
  uint32_t slot = 0;
  uint32_t holds = 0;    // references of collectives that wait for their turn
  uint64_t launch = 0;   // programs that had started at its making, by launch (checks.h)
  uint32_t writers = 0;  // CPU kernels that write its memory just now
  uint32_t stack = 0;    // where it was made, if that is recorded (memory_stacks.h)
  std::shared_ptr<const Failure> failure;  // Failed

  ~Value() override;
  static void* operator new(size_t size);
  static void operator delete(void* memory);
  void set_array(PyObject* owned);                     // becomes Ready
  void set_host(at::Tensor memory, bool is_borrowed);  // becomes Host
  void fail(std::shared_ptr<const Failure> why);
  void take_memory();  // counted in the device's memory from now on
  void leave_memory(bool donated);
  // Whether a collective will make it that was called and is not sent yet.
  bool is_promised() const { return state == State::Running && !trace; }
};
using ValuePtr = c10::intrusive_ptr<Value>;

struct Cell {
  ValuePtr value;
  void* address = nullptr;
  // Where a segment remembers what the cell held before (former.h); valid for the segment of that stamp.
  uint64_t former_stamp = 0;
  uint32_t former = 0;
  // Of the address space (memory.cpp).
  uint32_t generation = 0;  // storages that had the cell before
  Cell* next_free = nullptr;
  int16_t device = 0;
  uint8_t size_class = 0;
  bool in_use = false;
};

ValuePtr make_value(const Layout& layout, size_t nbytes, int16_t device, State state);
// One whose elements lie as those of a dense CPU tensor, which it keeps. Nothing else holds the tensor.
ValuePtr make_host_value(at::Tensor memory, size_t nbytes, int16_t device);

// The Cell of a tensor's or storage's memory; an error if the storage is not ours.
Cell* cell_of(const at::Tensor& t);
Cell* cell_of(const c10::StorageImpl* storage);

// Queues a Python reference, of any thread, for `drain_references`. `nbytes` of device memory go with it;
// what has none is dropped as soon as the interpreter can.
void release_reference(PyObject* object, size_t nbytes = SIZE_MAX / 2);
void drain_references();

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides);
inline int64_t numel_of(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (auto s : sizes) n *= s;
  return n;
}

}  // namespace tpu

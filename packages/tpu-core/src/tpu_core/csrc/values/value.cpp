#include "values/value.h"

#include "runtime/python.h"
#include "values/free_memory.h"
#include "values/memory.h"
#include "values/memory_history.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace tpu {

namespace {
struct References {
  std::vector<PyObject*> queue;
  size_t held_bytes = 0;
  bool is_scheduled = false;
};
auto& g_references = *new Guarded<References>;
std::atomic<bool> g_any_reference{false};  // without the lock
// The next segment that runs drops what is queued; the interpreter is asked to do so sooner, which costs
// it a stop, where that would hold on to memory.
constexpr size_t kSmall = 1 << 16, kFew = 64;

// Memory of values that are gone, for this thread's next ones: a segment holds its temporaries until it
// has run, by the hundred, and malloc keeps few of a size at hand.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kFreeValues = 0;  // a use after the end is seen then
#else
constexpr size_t kFreeValues = 2048;
#endif
struct FreeValues {
  std::vector<void*> memory;
  ~FreeValues();
};
thread_local FreeValues t_free_values;
thread_local bool t_ended = false;  // the thread's destructors may still drop values

FreeValues::~FreeValues() {
  t_ended = true;
  for (auto* m : memory) ::operator delete(m);
}

// A value that other threads may reach is written with g_mutex.
void assert_writable([[maybe_unused]] Value& v) {
#ifdef TPU_CHECK_LOCKS
  if (c10::raw::intrusive_ptr::use_count(&v) > 1) TPU_ASSERT_LOCKED();
#endif
}

int drain_pending(void*) {
  drain_references();
  return 0;
}
}  // namespace

void release_reference(PyObject* object, size_t nbytes) {
  // In a forked child PJRT's threads are gone: what they own is left to the process' end.
  if (!object || !Py_IsInitialized() || in_bad_fork()) return;
  // A dropped reference may run Python code, so even with the GIL it waits until no lock is held.
  bool schedule;
  {
    auto references = g_references.lock();
    references->queue.push_back(object);
    g_any_reference = true;
    references->held_bytes += nbytes;
    schedule = !references->is_scheduled &&
        (references->held_bytes > kSmall || references->queue.size() >= kFew);
    references->is_scheduled = references->is_scheduled || schedule;
  }
  if (schedule && Py_AddPendingCall(drain_pending, nullptr) != 0) {
    // The interpreter's queue is full; the next reference tries again.
    g_references.lock()->is_scheduled = false;
  }
}

void drain_references() {
  std::vector<PyObject*> dropped;
  if (!g_any_reference) return;
  {
    auto references = g_references.lock();
    dropped.swap(references->queue);
    g_any_reference = false;
    references->held_bytes = 0;
    references->is_scheduled = false;
  }
  for (auto* object : dropped) Py_DECREF(object);
  dropped.clear();
  auto references = g_references.lock();
  if (references->queue.capacity() == 0) references->queue.swap(dropped);
}

Failure::~Failure() { release_reference(exception); }

void Failure::raise() const {
  py::gil_scoped_acquire gil;
  PyException_SetTraceback(
      exception, Py_None);  // that of the first time does not belong to this read
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
  throw PythonError::current();
}

void* Value::operator new(size_t size) {
  if (t_ended || t_free_values.memory.empty()) return ::operator new(size);
  void* memory = t_free_values.memory.back();
  t_free_values.memory.pop_back();
  return memory;
}

void Value::operator delete(void* memory) {
  if (t_ended || t_free_values.memory.size() >= kFreeValues) return ::operator delete(memory);
  t_free_values.memory.push_back(memory);
}

Value::~Value() {
  leave_memory(false);
  release_reference(array, nbytes);
}

void Value::take_memory() {
  if (accounted) return;
  account(device, static_cast<int64_t>(nbytes), this);
  accounted = true;
  note_made(nbytes);
  if (records_memory()) record_allocation(*this);
}

void Value::leave_memory(bool donated) {
  if (!accounted) return;
  account(device, -static_cast<int64_t>(nbytes), this);
  accounted = false;
  if (records_memory()) record_free(*this, donated);
}

void Value::set_array(PyObject* owned) {
  assert_writable(*this);
  release_reference(array, nbytes);
  array = owned;
  state = State::Ready;
  trace = nullptr;
  host = at::Tensor();
  borrowed = false;
  take_memory();
}

void Value::set_host(at::Tensor memory, bool is_borrowed) {
  assert_writable(*this);
  host = std::move(memory);
  borrowed = is_borrowed;
  state = State::Host;
  release_reference(std::exchange(array, nullptr), nbytes);
}

void Value::fail(std::shared_ptr<const Failure> why) {
  assert_writable(*this);
  state = State::Failed;
  trace = nullptr;
  failure = std::move(why);
}

namespace {
ValuePtr begin_value(ValuePtr v, size_t nbytes, int16_t device, State state) {
  v->nbytes = nbytes;
  v->device = device;
  v->state = state;
  if (records_memory()) v->stack = stack_of_allocation();
  if (state != State::Pending) v->take_memory();
  return v;
}
}  // namespace

ValuePtr make_value(const Layout& layout, size_t nbytes, int16_t device, State state) {
  return begin_value(c10::make_intrusive<Value>(layout), nbytes, device, state);
}

ValuePtr make_host_value(at::Tensor memory, size_t nbytes, int16_t device) {
  auto v = begin_value(
      c10::make_intrusive<Value>(memory.scalar_type(), memory.sizes(), memory.strides()), nbytes,
      device, State::Host);
  v->host = std::move(memory);
  return v;
}

Cell* cell_of(const c10::StorageImpl* storage) {
  const auto& ptr = storage->data_ptr();
  if (C10_LIKELY(ptr.get_deleter() == &free_cell)) return static_cast<Cell*>(ptr.get_context());
  // PyTorch wraps our addresses in borrowed storages (`from_blob`) to save and load them.
  Cell* cell = cell_of_address(ptr.get());
  // The storage of a fake tensor is on meta, whatever device the tensor claims to be on.
  TORCH_CHECK(
      cell || !ptr.device().is_meta(),
      "tpu: the memory of a fake tensor was read or written, and it has none. While torch.compile, "
      "torch.export or a FakeTensorMode traces a program, fake tensors stand in for the real ones; "
      "a "
      "function that PyTorch cannot see into (one of another library, of an extension) was called "
      "with "
      "them as if they were real.\nWhat to do: make that function a custom op "
      "(torch.library.custom_op with register_fake; tpu_kernels.jax_op for one of JAX), or leave "
      "it out "
      "of what is traced, with @torch.compiler.disable.");
  TORCH_CHECK(
      cell, "tpu: this storage on ", ptr.device(),
      " was not allocated by tpu_core; another library may have replaced the device's allocator.");
  return cell;
}

Cell* cell_of(const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.has_storage(),
      "tpu: a tensor without storage (sparse or a subclass) reached a dense kernel.");
  return cell_of(t.storage().unsafeGetStorageImpl());
}

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

}  // namespace tpu

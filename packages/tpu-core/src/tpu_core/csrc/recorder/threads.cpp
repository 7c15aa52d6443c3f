#include "recorder/threads.h"

#include "runtime/python.h"
#include "values/memory.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <vector>

namespace tpu {
namespace {

constexpr const char* kTraceKey = "tpu_trace";

// The traces of one user thread, one a device. A trace that still has ops to run outlives its thread.
struct ThreadTraces {
  std::array<Trace*, 128> by_device{};
  Mode mode;
  bool has_mode = false;

  ~ThreadTraces() {
    Lock lock(g_mutex, std::try_to_lock);  // may hold the GIL, so it must not wait
    if (!lock) return;
    for (auto* t : by_device)
      if (t && t->current.nodes.empty() && !t->capture) delete t;
  }
};
// Read by any thread without a lock: a mode that was the default once stays where it is.
std::atomic<const Mode*> g_default_mode{new Mode};

thread_local std::shared_ptr<ThreadTraces> t_own;
thread_local std::shared_ptr<ThreadTraces> t_adopted;
thread_local int t_adopted_task = -1;
std::atomic<bool> g_autograd_ran{false};

// Owner of the ThreadTraces that travel with autograd's ThreadLocalState, as a Python capsule.
void publish(const std::shared_ptr<ThreadTraces>& own) {
  py::gil_scoped_acquire gil;
  py::capsule capsule(new std::shared_ptr<ThreadTraces>(own), [](void* p) {
    delete static_cast<std::shared_ptr<ThreadTraces>*>(p);
  });
  // The last owner may be a thread that ends while the interpreter does: it must not ask for the GIL.
  at::impl::ThreadLocalPythonObjects::set(
      kTraceKey,
      std::shared_ptr<c10::SafePyObject>(
          new c10::SafePyObject(capsule.release().ptr(), getPyInterpreter()),
          [](c10::SafePyObject* p) {
            release_reference(p->release());
            delete p;
          }));
}

ThreadTraces* thread_traces() {
  if (t_own) return t_own.get();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != -1) {
    if (t_adopted_task == task && t_adopted) return t_adopted.get();
    if (at::impl::ThreadLocalPythonObjects::contains(kTraceKey)) {
      py::gil_scoped_acquire gil;
      auto* object = at::impl::ThreadLocalPythonObjects::get(kTraceKey)->ptr(getPyInterpreter());
      t_adopted =
          *static_cast<std::shared_ptr<ThreadTraces>*>(PyCapsule_GetPointer(object, nullptr));
    } else {
      // The caller of backward has recorded nothing itself. A trace of this thread's own would keep
      // it from ever joining another caller's.
      t_adopted = std::make_shared<ThreadTraces>();
    }
    t_adopted_task = task;
    g_autograd_ran = true;
    return t_adopted.get();
  }
  t_own = std::make_shared<ThreadTraces>();
  publish(t_own);
  return t_own.get();
}

}  // namespace

const Mode& mode() {
  const auto* t = thread_traces();
  return t->has_mode ? t->mode : *g_default_mode.load(std::memory_order_acquire);
}

void set_default_mode(const Mode& m) {
  static auto& all = *new std::vector<std::unique_ptr<Mode>>;  // the GIL
  auto same = std::find_if(all.begin(), all.end(), [&](const auto& known) { return *known == m; });
  if (same == all.end()) same = all.insert(all.end(), std::make_unique<Mode>(m));
  g_default_mode.store(same->get(), std::memory_order_release);
}

void set_thread_mode(const std::optional<Mode>& m) {
  auto* t = thread_traces();
  t->has_mode = m.has_value();
  if (m) t->mode = *m;
}

std::optional<Mode> thread_mode() {
  auto* t = thread_traces();
  if (!t->has_mode) return std::nullopt;
  return t->mode;
}

Trace* current_trace(int16_t device) {
  auto& trace = thread_traces()->by_device.at(device);
  if (!trace) trace = new Trace(device);
  return trace;
}

void flush_current(const char* cut) {
  if (in_bad_fork()) return;  // a child that leaves the device alone has nothing to run
  WithoutGil no_gil;
  Lock lock(g_mutex);
  for (auto* t : thread_traces()->by_device)
    if (t) flush(t, lock, cut);
}

void add_undo(int16_t device, PyObject* function) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  current_trace(device)->current.former.undo.push_back(Py_NewRef(function));
}

void wait_for_autograd() {
  if (!g_autograd_ran || in_bad_fork()) return;
  WithoutGil no_gil;
  for (int16_t i = 0; i < device_count(); ++i) {
    const auto options = at::device(at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(i)));
    const at::Tensor x = at::empty({1}, options).requires_grad_();
    torch::autograd::grad({x.view({1})}, {x}, {at::empty({1}, options)});
  }
}

}  // namespace tpu

#include "trace.h"

#include "memory.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace tpu {
namespace {

constexpr const char* kTraceKey = "tpu_trace";

struct Program {
  py::object execute;           // LoadedExecutable.execute_sharded, bound
  py::object handlers;          // result handlers for consume_with_handlers
  py::object info;              // Python's record of the program
  std::vector<uint32_t> inputs;   // slots, in the order of the executable's parameters
  std::vector<uint32_t> outputs;  // slots, in the order of its results
  std::vector<uint8_t> compiled_in;
  std::vector<uint64_t> constants;  // the numbers it was compiled with
  int64_t memory = 0;             // bytes of temporaries
  bool checks_memory = false;
};

// Never destroyed: static destructors run after the interpreter's end.
using Programs = std::unordered_map<Hash128, std::vector<std::unique_ptr<Program>>, HashOfHash>;
auto& g_programs = *new Programs();
std::condition_variable_any g_finished;
std::atomic<int> g_waiting{0};
std::array<PyObject*, 128> g_newest{};  // per device, owned
uint64_t g_stamp = 0;
Counters g_counters;
auto& g_traces = *new std::unordered_set<Trace*>();

// The traces of one user thread, one a device. A trace that still has ops to run outlives its thread.
struct ThreadTraces {
  std::array<Trace*, 128> by_device{};
  Mode mode;
  bool has_mode = false;

  ~ThreadTraces() {
    Lock lock(g_mutex, std::try_to_lock);  // may hold the GIL, so it must not wait
    if (!lock) return;
    for (auto* t : by_device)
      if (t && t->current.nodes.empty()) {
        g_traces.erase(t);
        delete t;
      }
  }
};
Mode g_default_mode;

thread_local std::shared_ptr<ThreadTraces> t_own;
thread_local std::shared_ptr<ThreadTraces> t_adopted;
thread_local int t_adopted_task = -1;

// Owner of the ThreadTraces that travel with autograd's ThreadLocalState, as a Python capsule.
void publish(const std::shared_ptr<ThreadTraces>& own) {
  py::gil_scoped_acquire gil;
  py::capsule capsule(
      new std::shared_ptr<ThreadTraces>(own),
      [](void* p) { delete static_cast<std::shared_ptr<ThreadTraces>*>(p); });
  at::impl::ThreadLocalPythonObjects::set(
      kTraceKey, std::make_shared<c10::SafePyObject>(capsule.release().ptr(), getPyInterpreter()));
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
    return t_adopted.get();
  }
  t_own = std::make_shared<ThreadTraces>();
  publish(t_own);
  return t_own.get();
}

// Takes g_mutex while the GIL is held, without ever waiting for the one with the other.
void acquire(Lock& lock) {
  if (lock.try_lock()) return;
  WithoutGil no_gil;
  lock.lock();
}

// What Python's compiler sees of a segment; made on a miss only.
py::dict export_segment(
    const Segment& s,
    const Hash128& key,
    const std::vector<uint32_t>& live,
    const std::vector<uint32_t>& donated,
    const std::vector<uint8_t>& compiled_in) {
  py::list nodes;
  for (const auto& n : s.nodes) {
    py::list operands, outputs;
    for (uint32_t i = 0; i < n.operands; ++i) operands.append(s.refs[n.refs + i]);
    for (uint32_t i = 0; i < n.outputs; ++i) {
      const auto slot = s.refs[n.refs + n.operands + i];
      if (slot == kNoSlot) outputs.append(py::none());
      else outputs.append(slot);
    }
    nodes.append(py::make_tuple(
        n.signature->plan ? n.signature->plan : py::object(py::none()), operands, outputs, n.numbers,
        describe(n.line)));
  }
  py::list slots, numbers;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const auto& l = s.slots[i]->layout;
    slots.append(py::make_tuple(
        static_cast<bool>(s.is_input[i]),
        static_cast<int>(l.dtype),
        py::tuple(py::cast(std::vector<int64_t>(l.sizes.begin(), l.sizes.end())))));
  }
  for (size_t i = 0; i < s.numbers.size(); ++i) {
    py::object value;
    if (s.packs[i] == Pack::F32 || s.packs[i] == Pack::F64) {
      double d;
      std::memcpy(&d, &s.numbers[i], 8);
      value = py::float_(d);
    } else {
      value = py::int_(static_cast<int64_t>(s.numbers[i]));
    }
    numbers.append(py::make_tuple(
        static_cast<int>(s.packs[i]), static_cast<bool>(compiled_in[i]), value));
  }
  py::dict d;
  char hex[33];
  snprintf(
      hex, sizeof hex, "%016llx%016llx", (unsigned long long)key.lo, (unsigned long long)key.hi);
  d["key"] = hex;
  d["device"] = s.device;
  d["cut"] = s.cut;
  d["nodes"] = nodes;
  d["slots"] = slots;
  d["numbers"] = numbers;
  d["live"] = live;
  d["donated"] = donated;
  return d;
}

void upload_host_inputs(Segment& s) {
  for (size_t i = 0; i < s.slots.size(); ++i) {
    auto& v = s.slots[i];
    if (!s.is_input[i] || v->state != State::Host) continue;
    py::object array = callback("device_put")(py::cast(v->host), s.device);
    v->set_array(array.release().ptr());
  }
}

Program* find_program(
    std::vector<std::unique_ptr<Program>>& programs, const Segment& s, std::vector<uint8_t>& mask) {
  for (auto& p : programs) {
    bool same = true;
    for (size_t i = 0; i < s.numbers.size() && same; ++i)
      same = !p->compiled_in[i] || p->constants[i] == s.numbers[i];
    if (same) return p.get();
  }
  if (programs.empty()) {
    mask = s.compiled_in;
  } else {
    // Numbers seen to vary become run-time inputs.
    auto& last = *programs.back();
    mask = last.compiled_in;
    for (size_t i = 0; i < mask.size(); ++i)
      if (last.constants[i] != s.numbers[i]) mask[i] = 0;
  }
  return nullptr;
}

void append_packs(py::list& arguments, const Segment& s, const Program& p) {
  std::array<std::string, kPacks> bytes;
  for (size_t i = 0; i < s.numbers.size(); ++i) {
    if (p.compiled_in[i]) continue;
    const uint64_t bits = s.numbers[i];
    auto& b = bytes[static_cast<int>(s.packs[i])];
    switch (s.packs[i]) {
      case Pack::F64:
      case Pack::I64:
        b.append(reinterpret_cast<const char*>(&bits), 8);
        break;
      case Pack::F32: {
        double d;
        std::memcpy(&d, &bits, 8);
        const float f = static_cast<float>(d);
        b.append(reinterpret_cast<const char*>(&f), 4);
        break;
      }
      case Pack::I32: {
        const int32_t n = static_cast<int32_t>(static_cast<int64_t>(bits));
        b.append(reinterpret_cast<const char*>(&n), 4);
        break;
      }
    }
  }
  for (int k = 0; k < kPacks; ++k)
    if (!bytes[k].empty()) arguments.append(callback("pack")(k, py::bytes(bytes[k]), s.device));
}

// A new reference, or the Python error raised.
py::object checked(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

py::object execute(Program& p, Segment& s) {
  static PyObject* consume = PyUnicode_InternFromString("consume_with_handlers");
  py::list arguments(p.inputs.size());
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    PyObject* array = s.slots[p.inputs[i]]->array;
    Py_INCREF(array);
    PyList_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i), array);
  }
  if (!s.numbers.empty()) append_packs(arguments, s, p);
  auto sharded = checked(PyObject_CallOneArg(p.execute.ptr(), arguments.ptr()));
  auto results =
      checked(PyObject_CallMethodOneArg(sharded.ptr(), consume, p.handlers.ptr()));
  return checked(PySequence_Fast(results.ptr(), "tpu: results must be a sequence"));
}

// What a cut decides while g_mutex is held: which values live on, which inputs may be reused, which
// program serves.
struct Cut {
  std::vector<uint32_t> live, donated, inputs;
  std::vector<uint8_t> mask;  // numbers to compile in, where no program serves
  Hash128 key;
  Program* program = nullptr;
  std::shared_ptr<const Failure> failed;  // of an input
};

Cut decide(Segment& s) {
  Cut c;
  const bool keep = mode().inspect != nullptr;  // an inspection looks at the inputs, too
  Hasher h = s.hasher;
  for (uint32_t i = 0; i < s.slots.size(); ++i) {
    auto& v = s.slots[i];
    const bool only_here = v.use_count() == 1;
    if (s.is_input[i]) {
      if (v->state == State::Failed) c.failed = v->failure;
      c.inputs.push_back(i);
      if (only_here && !v->shared && !keep) {
        c.donated.push_back(i);
        h.add(i * 4ull + 1);
      }
    } else if (!only_here) {
      c.live.push_back(i);
      h.add(i * 4ull + 2);
    }
  }
  h.add(static_cast<uint64_t>(s.device));
  c.key = h.digest();
  c.program = find_program(g_programs[c.key], s, c.mask);
  ++g_counters.segments;
  return c;
}

void fail(Segment& s, std::shared_ptr<const Failure> why) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  for (auto& v : s.slots)
    if (v && v->state == State::Running) v->fail(why);
  g_finished.notify_all();
}

Program* compile(const Segment& s, const Cut& c) {
  py::object info = callback("compile")(export_segment(s, c.key, c.live, c.donated, c.mask));
  auto fresh = std::make_unique<Program>();
  fresh->execute = info.attr("execute");
  fresh->handlers = info.attr("handlers");
  fresh->memory = info.attr("temporary_bytes").cast<int64_t>();
  fresh->checks_memory = info.attr("checks_memory").cast<bool>();
  fresh->info = info;
  fresh->inputs = c.inputs;
  fresh->outputs = c.live;
  fresh->compiled_in = c.mask;
  fresh->constants = s.numbers;
  auto* program = fresh.get();
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  g_programs[c.key].push_back(std::move(fresh));
  return program;
}

// The array of a value that nothing else holds; its layout stays, for what is said of the segment.
void drop_array(Value& v) {
  if (v.accounted) account(v.device, -static_cast<int64_t>(v.nbytes));
  v.accounted = false;
  v.state = State::Uninitialized;
  release_reference(std::exchange(v.array, nullptr));
}

// Waits for the results and shows them, with the inputs, to the mode's inspection. What that raises
// reaches the user as it is; the results stay.
void inspect(const Segment& s, const Cut& c, const Mode& m) {
  auto arrays = [&](const std::vector<uint32_t>& slots) {
    py::list list;
    for (auto i : slots) list.append(py::reinterpret_borrow<py::object>(s.slots[i]->array));
    return list;
  };
  py::object function = py::none();
  if (m.inspect) function = py::reinterpret_borrow<py::object>(m.inspect);
  callback("inspect")(
      export_segment(s, c.key, c.live, c.donated, c.program->compiled_in),
      m.inspect ? arrays(c.inputs) : py::list(), arrays(c.live), function);
}

// Runs a segment that was taken off its trace. Holds the GIL; g_mutex is not held.
void run(Segment& s, Cut& c) {
  if (c.failed) {
    fail(s, c.failed);
    c.failed->raise();
  }
  if (c.live.empty()) return;  // nothing that ran could be seen
  try {
    upload_host_inputs(s);
    if (c.program) ++g_counters.hits;
    else c.program = compile(s, c);
    auto& program = *c.program;
    if (program.checks_memory) {
      int64_t outputs = 0;
      for (auto i : c.live) outputs += static_cast<int64_t>(s.slots[i]->nbytes);
      callback("check_memory")(s.device, program.info, outputs, allocated_bytes(s.device));
    }
    ++g_counters.executions;
    auto results = execute(program, s);
    note_peak(s.device, program.memory);
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      // Donated inputs are deleted: drop them first, so that memory statistics see them go.
      for (auto i : c.donated) drop_array(*s.slots[i]);
      for (size_t i = 0; i < c.live.size(); ++i) {
        PyObject* array = PySequence_Fast_GET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i));
        Py_INCREF(array);
        s.slots[c.live[i]]->set_array(array);
      }
      if (g_waiting) g_finished.notify_all();
    }
    // The device runs in order: waiting for its newest result waits for everything.
    PyObject* newest = s.slots[c.live[0]]->array;
    Py_INCREF(newest);
    Py_XDECREF(std::exchange(g_newest[s.device], newest));
  } catch (py::error_already_set& error) {
    // Every result of the segment carries the error; so do storages whose old value was donated.
    py::object mapped = callback("segment_failed")(
        error.value(), export_segment(s, c.key, c.live, {}, s.compiled_in));
    auto failure = std::make_shared<const Failure>(mapped.release().ptr());
    fail(s, failure);
    failure->raise();
  } catch (const std::exception& error) {
    py::object text = py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.what());
    fail(s, std::make_shared<const Failure>(text.release().ptr()));
    throw;
  }
  const Mode m = mode();
  if (m.wait || m.inspect) inspect(s, c, m);
}

}  // namespace

Mode& mode() {
  auto* t = thread_traces();
  return t->has_mode ? t->mode : g_default_mode;
}

void set_default_mode(const Mode& m) { g_default_mode = m; }

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

Trace::Trace(int16_t d) : device(d) {
  restart();
  g_traces.insert(this);
}

void Trace::restart() {
  current = Segment();
  current.device = device;
  current.stamp = ++g_stamp;
}

uint32_t Trace::input_slot(const ValuePtr& v) {
  if (v->stamp == current.stamp) return v->slot;
  const auto slot = static_cast<uint32_t>(current.slots.size());
  // A value may be an input of several threads' segments; only the last one's slot is remembered,
  // so the others look it up.
  if (v->stamp != 0 && !current.slots.empty()) {
    for (uint32_t i = 0; i < current.slots.size(); ++i)
      if (current.slots[i].get() == v.get()) {
        v->stamp = current.stamp;
        v->slot = i;
        return i;
      }
  }
  v->stamp = current.stamp;
  v->slot = slot;
  current.slots.push_back(v);
  current.is_input.push_back(1);
  return slot;
}

uint32_t Trace::output_slot(const ValuePtr& v) {
  const auto slot = static_cast<uint32_t>(current.slots.size());
  v->stamp = current.stamp;
  v->slot = slot;
  v->trace = this;
  current.slots.push_back(v);
  current.is_input.push_back(0);
  return slot;
}

Trace* current_trace(int16_t device) {
  auto& trace = thread_traces()->by_device.at(device);
  if (!trace) trace = new Trace(device);
  return trace;
}

void flush(Trace* trace, Lock& lock, const char* cut) {
  if (trace->current.nodes.empty()) return;
  Segment segment = std::move(trace->current);
  trace->restart();
  segment.cut = cut;
  for (size_t i = 0; i < segment.slots.size(); ++i)
    if (!segment.is_input[i] && segment.slots[i]->state == State::Pending)
      segment.slots[i]->state = State::Running;
  // An input that is still pending or running belongs to another thread: it must be there first.
  for (size_t i = 0; i < segment.slots.size(); ++i) {
    auto v = segment.slots[i];
    if (segment.is_input[i] && (v->state == State::Pending || v->state == State::Running))
      settle(v, lock, "another thread's value");
  }
  Cut decision = decide(segment);
  lock.unlock();
  struct Relock {
    Lock& lock;
    ~Relock() {
      WithoutGil no_gil;
      lock.lock();
    }
  } relock{lock};
  py::gil_scoped_acquire gil;
  run(segment, decision);
  segment = Segment();
  drain_references();
}

void settle(const ValuePtr& v, Lock& lock, const char* cut) {
  while (true) {
    switch (v->state) {
      case State::Pending:
        flush(v->trace, lock, cut);
        break;
      case State::Running: {
        WithoutGil no_gil;
        ++g_waiting;
        g_finished.wait(lock);
        --g_waiting;
        break;
      }
      case State::Failed:
        v->failure->raise();
      default:
        return;
    }
  }
}

void flush_all(int16_t device, const char* cut) {
  if (in_bad_fork()) ensure_initialized();  // raises
  WithoutGil no_gil;
  Lock lock(g_mutex);
  std::vector<Trace*> traces(g_traces.begin(), g_traces.end());
  for (auto* t : traces)
    if (g_traces.count(t) && (device < 0 || t->device == device)) flush(t, lock, cut);
}

void flush_current(const char* cut) {
  if (in_bad_fork()) return;  // a child that leaves the device alone has nothing to run
  WithoutGil no_gil;
  Lock lock(g_mutex);
  for (auto* t : thread_traces()->by_device)
    if (t) flush(t, lock, cut);
}

int64_t pending_bytes(int16_t device) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  int64_t bytes = 0;
  for (auto* t : g_traces) {
    if (t->device != device) continue;
    for (size_t i = 0; i < t->current.slots.size(); ++i)
      if (!t->current.is_input[i] && t->current.slots[i].use_count() > 1)
        bytes += static_cast<int64_t>(t->current.slots[i]->nbytes);
  }
  return bytes;
}

PyObject* newest_array(int16_t device) { return g_newest.at(device); }

Counters counters() { return g_counters; }

void count_op() { ++g_counters.ops; }
void count_signature() { ++g_counters.signatures; }

void clear_programs() {
  Programs dropped;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    dropped.swap(g_programs);
  }
}

}  // namespace tpu

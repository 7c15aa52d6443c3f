#include "recorder/trace.h"

#include "execution/host_kernels.h"
#include "execution/program.h"
#include "execution/state_init.h"
#include "recorder/capture.h"
#include "recorder/checks.h"
#include "recorder/threads.h"
#include "runtime/python.h"
#include "values/memory.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <unordered_set>
#include <utility>

namespace tpu {
namespace {

auto& g_finished = *new std::condition_variable_any;
std::atomic<int> g_waiting{0};
uint64_t g_stamp = 0;
// Never destroyed: static destructors run after the interpreter's end.
auto& g_traces = *new std::unordered_set<Trace*>();

// Python runs without the lock, whatever it raises.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { acquire(lock_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

// A segment that has run lends its memory to the next: in Strict each op is a segment.
constexpr size_t kSpareNodes = 1024;
thread_local Segment t_spare;

// An input that is pending or running is another thread's, or promised: it must be there first. So must
// collectives be sent that read it, or whether it is donated would follow from chance. What it failed with is
// raised when the segment runs.
void await_input(const ValuePtr& v, Lock& lock) {
  while (true) {
    if (v->state == State::Pending) {
      if (v->trace->capture) refuse_captured_value(lock);
      try {
        flush(v->trace, lock, "another thread's value");
      } catch (const PythonError&) {
        if (v->state != State::Failed) throw;
      }
    } else if (v->state == State::Running || v->holds || v->writers) {
      wait_for_change(lock);
    } else {
      return;
    }
  }
}

void recycle(Segment&& s) {
  s.clear();
  if (s.nodes.capacity() <= kSpareNodes) t_spare = std::move(s);
}

}  // namespace

void wait_for_change(Lock& lock) {
  {
    WithoutGil no_gil;
    ++g_waiting;
    g_finished.wait_for(lock, std::chrono::milliseconds(200));
    --g_waiting;
  }
  if (!handles_signals()) return;
  Unlocked unlocked(lock);
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw PythonError::current();
}

void notify_settled() {
  TPU_ASSERT_LOCKED();
  if (g_waiting) g_finished.notify_all();
}

Counters& counters() {
  static Counters all;
  return all;
}

void Segment::clear() {
  nodes.clear();
  refs.clear();
  slots.clear();
  is_input.clear();
  numbers.clear();
  packs.clear();
  compiled_in.clear();
  shared.clear();
  former.clear();
  words.clear();
  correlations.clear();
  hasher = Hasher();
}

Trace::Trace(int16_t d) : device(d) {
  restart();
  g_traces.insert(this);
}

Trace::~Trace() { g_traces.erase(this); }

void Trace::restart() {
  current = std::exchange(t_spare, Segment());
  current.device = device;
  current.stamp = ++g_stamp;
  cut_due = nullptr;
}

// Gives a value its slot in the current segment. It may be an input of several threads' segments, and
// keeps the slot of the last of them.
void Trace::enter(Value& v, uint32_t slot) {
  if (v.stamp != 0 && g_traces.size() > 1)
    for (auto* other : g_traces)
      if (other->current.stamp == v.stamp) other->current.shared.emplace(&v, v.slot);
  v.stamp = current.stamp;
  v.slot = slot;
}

void Trace::resume(Segment&& s) {
  current = std::move(s);
  current.stamp = ++g_stamp;
  for (uint32_t i = 0; i < current.slots.size(); ++i) enter(*current.slots[i], i);
  renew_former(current);
}

uint32_t Trace::input_slot(ValuePtr v) {
  TPU_ASSERT_LOCKED();
  if (v->stamp == current.stamp) return v->slot;
  if (!current.shared.empty())
    if (auto it = current.shared.find(v.get()); it != current.shared.end()) return it->second;
  const auto slot = static_cast<uint32_t>(current.slots.size());
  enter(*v, slot);
  current.slots.push_back(std::move(v));
  current.is_input.push_back(1);
  return slot;
}

uint32_t Trace::output_slot(ValuePtr v) {
  const auto slot = static_cast<uint32_t>(current.slots.size());
  v->stamp = current.stamp;
  v->slot = slot;
  v->trace = this;
  current.slots.push_back(std::move(v));
  current.is_input.push_back(0);
  return slot;
}

void flush(Trace* trace, Lock& lock, const char* cut) {
  TPU_ASSERT_LOCKED();
  if (trace->capture) return;
  if (cut != kForHost) trace->tiering.end();
  const bool is_forced = cut != kCutAtRepetition && cut != kCutAtBound;
  if (is_forced) trace->varying_loops.forced_cut();
  if (trace->current.nodes.empty()) return;
  if (is_forced) trace->cut_points.forced_cut();
  close_checks(*trace);
  Segment segment = std::move(trace->current);
  trace->restart();
  segment.cut = cut;
  for (size_t i = 0; i < segment.slots.size(); ++i)
    if (!segment.is_input[i] && segment.slots[i]->state == State::Pending)
      segment.slots[i]->state = State::Running;
  try {
    for (size_t i = 0; i < segment.slots.size(); ++i)
      if (segment.is_input[i]) await_input(ValuePtr(segment.slots[i]), lock);
  } catch (const PythonError&) {
    put_back(trace, segment);
    throw;
  }
  Cut decision = decide(segment);
  const FormerInUse former(segment.former);
  Unlocked unlocked(lock);
  py::gil_scoped_acquire gil;
  try {
    run_after_new_state(segment, decision);
  } catch (const PythonError& error) {
    const bool is_left = !segment.nodes.empty();  // none of it has run
    if (is_left && is_interruption(error) && !put_back(trace, segment)) give_up(segment, error);
    if (is_out_of_memory(error)) roll_back(segment.former);
    throw;
  }
  sweep_checks(segment.device);
  recycle(std::move(segment));
  drain_references();
}

void end_host_segment(int16_t device) {
  if (tiers() != Tiers::Auto) return;
  auto& tiering = current_trace(device)->tiering;
  if (!tiering.is_recording()) tiering.end();
}

bool put_back(Trace* trace, Segment& s) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  if (!g_traces.count(trace) || !trace->current.nodes.empty()) return false;
  for (size_t i = 0; i < s.slots.size(); ++i)
    if (!s.is_input[i] && s.slots[i]->state == State::Running) s.slots[i]->state = State::Pending;
  trace->resume(std::move(s));
  notify_settled();
  return true;
}

void settle(const ValuePtr& v, Lock& lock, const char* cut) {
  while (true) {
    switch (v->state) {
      case State::Pending:
        if (v->trace->capture) refuse_captured_value(lock);
        flush(v->trace, lock, cut);
        break;
      case State::Running: wait_for_change(lock); break;
      case State::Failed: v->failure->raise();
      default: return;
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

std::unordered_map<const Cell*, ValuePtr> former_values() {
  TPU_ASSERT_LOCKED();
  std::vector<const FormerState*> formers;
  formers.reserve(g_traces.size());
  for (const auto* t : g_traces) formers.push_back(&t->current.former);
  add_running_formers(formers);
  std::unordered_map<const Cell*, ValuePtr> values;
  for (const auto* former : formers)
    for (const auto& f : former->storages)
      if (f.old && f.old->accounted && is_of(f.cell, f.generation))
        values.emplace(f.cell, ValuePtr::reclaim_copy(f.old));
  return values;
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

}  // namespace tpu

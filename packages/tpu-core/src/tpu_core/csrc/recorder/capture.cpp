#include "recorder/capture.h"

#include "execution/op_by_op.h"
#include "recorder/threads.h"
#include "values/device.h"
#include "values/memory.h"

#include <atomic>
#include <utility>

namespace tpu {
namespace {

std::atomic<int> g_captures{0};

}  // namespace

void raise_graph_error(const std::string& what) {
  ensure_initialized();
  Line line;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    line = user_line();
  }
  py::gil_scoped_acquire gil;
  callback("graph_failed")(what, describe(line));
  TORCH_INTERNAL_ASSERT(false);
}

bool any_captures() { return g_captures.load(std::memory_order_relaxed) != 0; }

bool is_capturing(int16_t device) {
  if (!any_captures()) return false;
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  return current_trace(device < 0 ? current_device() : device)->capture != nullptr;
}

void refuse_in_capture(int16_t device, const char* what) {
  if (!is_capturing(device)) return;
  const auto text = std::string(what) + " was called while a graph was captured.";
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    current_trace(device < 0 ? current_device() : device)->capture->invalidate(text);
  }
  raise_graph_error(text);
}

void refuse_captured_value(Lock& lock) {
  lock.unlock();
  raise_graph_error(
      "A value was needed that a graph computes, which is being captured and does not run.");
}

void note_allocated(const Cell* cell) {
  if (!any_captures() || !cell->address) return;
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  if (auto& capture = current_trace(cell->device)->capture) capture->add_own(cell);
}

bool is_made_in_capture(const Cell* cell) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  const auto& capture = current_trace(cell->device)->capture;
  return capture && capture->is_own(cell);
}

// The same contents as another value, for a storage that shared it.
ValuePtr Capture::copy_of(Value& v) {
  auto copy = c10::make_intrusive<Value>(v.layout);
  copy->nbytes = v.nbytes;
  copy->device = v.device;
  copy->state = v.state;
  copy->launch = v.launch;
  copy->shared = v.shared = true;  // neither may be donated while the other has the array
  if (v.state == State::Ready) {
    py::gil_scoped_acquire gil;
    copy->array = Py_NewRef(v.array);
  } else if (v.state == State::Host) {
    copy->host = v.host.clone();
  } else if (v.state != State::Uninitialized) {
    invalidate("Two tensors that the graph uses shared a value that was not there yet.");
  }
  return copy;
}

void Capture::touch(Cell* cell, const at::Tensor& t) {
  TPU_ASSERT_LOCKED();
  if (!cell->address || known_.count(cell)) return;
  auto& v = cell->value;
  if (v->state == State::Pending && v->trace == &trace_) return;  // an op of the capture made it
  if (v->state == State::Uninitialized && is_own(cell)) return;
  const size_t index = storages_.size();
  storages_.push_back({t.storage(), cell, v});
  known_.emplace(cell, index);
  if (by_value_.count(v.get())) cell->value = copy_of(*v);
  by_value_.emplace(cell->value.get(), index);
}

void Capture::add_draw(const at::Generator& generator) {
  TPU_ASSERT_LOCKED();
  draws_.emplace(trace_.current.nodes.size() - 1, generator);
  const uint64_t next = generator.get_offset();
  for (auto& [known, drawn] : drawn_)
    if (known == generator) return static_cast<void>(drawn.next = next);
  drawn_.push_back({generator, {generator.current_seed(), next - kDraw, next}});
}

std::unique_ptr<CapturedGraph> Capture::end(Segment&& segment) {
  TPU_ASSERT_LOCKED();
  auto graph = std::make_unique<CapturedGraph>();
  auto is_result = [&](const ValuePtr& v) {
    return v->state == State::Pending && v->trace == &trace_;
  };
  auto& g = *graph;
  auto add_output = [&](Cell* cell, uint32_t generation) -> CapturedGraph::Output& {
    const auto slot = cell->value->slot;
    g.outputs_of_[slot].push_back(g.outputs_.size());
    return g.outputs_.emplace_back(CapturedGraph::Output{cell, generation, slot, std::nullopt});
  };
  for (auto& s : storages_) {
    auto& v = s.cell->value;
    if (is_result(v)) {
      add_output(s.cell, s.cell->generation).storage = s.storage.getWeakStorageImpl();
      v = s.value;
    } else if (by_value_.count(v.get()) && v != s.value) {
      v = s.value;  // it was a copy
    }
  }
  for (const auto& [known, generation] : own_) {
    auto* cell = const_cast<Cell*>(known);
    if (!is_of(cell, generation) || known_.count(cell) || !is_result(cell->value)) continue;
    add_output(cell, generation);
    const auto& v = *cell->value;
    cell->value = make_value(v.layout, v.nbytes, v.device, State::Uninitialized);
  }
  for (uint32_t i = 0; i < segment.slots.size(); ++i) {
    const auto& v = segment.slots[i];
    if (segment.is_input[i]) {
      const auto it = by_value_.find(v.get());
      if (it == by_value_.end()) {
        invalidate("A tensor that the graph reads was replaced by another thread meanwhile.");
        continue;
      }
      g.inputs_.push_back({i, storages_[it->second].storage});
    } else if (is_result(v)) {
      v->trace = nullptr;  // of an empty storage
      v->state = State::Uninitialized;
    }
  }
  for (auto& v : segment.slots) v = make_value(v->layout, v->nbytes, v->device, State::Pending);
  segment.former.clear();
  segment.shared.clear();
  segment.correlations.clear();
  g.last_uses_ = last_uses(segment);
  for (const auto& [node, slot] : segment.words) g.words_.emplace(node, slot);
  segment.words.clear();
  g.ops_ = std::move(segment);
  g.draws_ = std::move(draws_);
  for (auto& [generator, drawn] : drawn_)
    if (generator.current_seed() == drawn.seed && generator.get_offset() == drawn.next)
      generator.set_offset(drawn.first);
  return graph;
}

Trace* begin_capture(int16_t device) {
  ensure_initialized();
  WithoutGil no_gil;
  Lock lock(g_mutex);
  Trace* trace = current_trace(device);
  if (trace->capture) return nullptr;
  flush(trace, lock, "start of a graph capture");
  trace->cut_due = nullptr;
  trace->capture = std::make_unique<Capture>(*trace);
  ++g_captures;
  return trace;
}

std::pair<std::unique_ptr<CapturedGraph>, std::string> end_capture(Trace* trace) {
  WithoutGil no_gil;
  std::unique_ptr<CapturedGraph> graph;
  std::unique_ptr<Capture> capture;
  {
    Lock lock(g_mutex);
    capture = std::move(trace->capture);
    --g_captures;
    Segment segment = std::move(trace->current);
    trace->restart();
    graph = capture->end(std::move(segment));
  }
  const std::string invalid = capture->invalid();
  if (!invalid.empty()) graph.reset();
  return {std::move(graph), invalid};
}

}  // namespace tpu

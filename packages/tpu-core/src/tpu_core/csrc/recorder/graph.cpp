// Replays of captured graphs, and PyTorch's interface to them.
#include "execution/profiler.h"
#include "execution/program.h"
#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/former.h"
#include "recorder/tensors.h"
#include "recorder/threads.h"
#include "runtime/torch_compat.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>

#include <atomic>
#include <utility>

namespace tpu {
namespace {

constexpr char kReplay[] = "replay of a graph";

bool has_layout(const Value& v, const Layout& l) {
  return !v.layout.untyped && v.layout.dtype == l.dtype && v.layout.sizes == l.sizes &&
      v.layout.strides == l.strides;
}

// A tensor of all of a storage, as a layout says.
at::Tensor tensor_of(const c10::Storage& storage, const Layout& l) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto t = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(l.dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(l.sizes, l.strides);
  return t;
}

// Gives a storage's value the layout that the graph's ops know, where a write since has changed it.
void restore_layout(const c10::Storage& storage, const Layout& l, size_t nbytes) {
  auto* cell = cell_of(storage.unsafeGetStorageImpl());
  auto fits = [&](bool settle) {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    auto& v = *cell->value;
    if (v.nbytes != nbytes) return true;  // `mismatch` says so
    if (settle && v.layout.untyped) settle_type(v, tensor_of(storage, l));
    return has_layout(v, l);
  };
  if (fits(true)) return;
  const at::NoGradGuard no_grad;
  const auto copy = own_value(tensor_of(storage, l), l.strides);
  WithoutGil no_gil;
  Lock lock(g_mutex);
  auto value = cell_of(copy)->value;
  cell->value = std::move(value);
}

}  // namespace

// Why the graph cannot be replayed on what its storages are now; empty where it can.
std::string CapturedGraph::mismatch() const {
  for (const auto& in : inputs_) {
    const auto& v = *cell_of(in.storage.unsafeGetStorageImpl())->value;
    const auto& expected = *ops_.slots[in.slot];
    if (v.nbytes != expected.nbytes)
      return "A storage that the graph reads has " + std::to_string(v.nbytes) + " bytes, and had " +
          std::to_string(expected.nbytes) + " when it was captured.";
    if (!has_layout(v, expected.layout))
      return "A tensor that the graph reads lies in memory otherwise than when it was captured.";
  }
  for (const auto& out : outputs_) {
    const auto storage = out.storage ? out.storage->lock() : nullptr;
    if (storage && (cell_of(storage.get()) != out.cell || !is_of(out.cell, out.generation)))
      return "A storage that the graph writes was resized since it was captured.";
  }
  return "";
}

// Waits for what other threads are to compute; whether there was anything.
bool CapturedGraph::settle_inputs(const Trace& trace, Lock& lock) const {
  for (const auto& in : inputs_) {
    const ValuePtr v = cell_of(in.storage.unsafeGetStorageImpl())->value;
    const bool is_foreign = v->state == State::Pending && v->trace != &trace;
    if (!is_foreign && v->state != State::Running && v->state != State::Failed) continue;
    settle(v, lock, kReplay);
    return true;
  }
  return false;
}

std::vector<ValuePtr> CapturedGraph::input_values(Trace& trace) const {
  std::vector<ValuePtr> values(ops_.slots.size());
  for (const auto& in : inputs_) {
    auto* cell = cell_of(in.storage.unsafeGetStorageImpl());
    if (cell->value->state == State::Uninitialized)
      operand_slot(&trace, cell, cell->value, ops_.nodes.front().line);
    values[in.slot] = cell->value;
  }
  return values;
}

void CapturedGraph::record_node(size_t i, Trace& trace, std::vector<ValuePtr>& values) const {
  const auto& n = ops_.nodes[i];
  c10::SmallVector<uint32_t, 8> slots;
  for (uint32_t k = 0; k < n.operands; ++k)
    slots.push_back(trace.input_slot(values[ops_.refs[n.refs + k]]));
  auto& s = trace.current;
  Node node = n;
  node.refs = static_cast<uint32_t>(s.refs.size());
  node.numbers = static_cast<uint32_t>(s.numbers.size());
  s.refs.insert(s.refs.end(), slots.begin(), slots.end());
  s.hasher.add(n.signature->hash);
  for (auto slot : slots) s.hasher.add(slot);
  const auto word = words_.find(i);
  for (uint32_t k = n.operands; k < n.operands + n.outputs; ++k) {
    const auto out = ops_.refs[n.refs + k];
    if (out == kNoSlot) {
      s.refs.push_back(kNoSlot);
      continue;
    }
    const auto& known = *ops_.slots[out];
    auto made = make_value(known.layout, known.nbytes, s.device, State::Pending);
    if (const auto it = outputs_of_.find(out); it != outputs_of_.end())
      for (const auto index : it->second) {
        const auto& output = outputs_[index];
        if (!is_of(output.cell, output.generation)) continue;
        remember_former(s, trace, output.cell, made.get());
        output.cell->value = made;
      }
    const auto slot = trace.output_slot(made);
    if (word != words_.end() && word->second == out)
      s.words.emplace_back(static_cast<uint32_t>(s.nodes.size()), slot);
    s.refs.push_back(slot);
    values[out] = std::move(made);
  }
  if (n.operands == 0 && !n.signature->plan)
    s.hasher.add(s.refs.back());  // as uninitialised memory is recorded
  s.nodes.push_back(node);
  const size_t last = i + 1 < ops_.nodes.size() ? ops_.nodes[i + 1].numbers : ops_.numbers.size();
  s.numbers.insert(s.numbers.end(), ops_.numbers.begin() + n.numbers, ops_.numbers.begin() + last);
  s.packs.insert(s.packs.end(), ops_.packs.begin() + n.numbers, ops_.packs.begin() + last);
  s.compiled_in.insert(
      s.compiled_in.end(), ops_.compiled_in.begin() + n.numbers, ops_.compiled_in.begin() + last);
  if (const auto draw = draws_.find(i); draw != draws_.end()) {
    const auto words = seed_words(next_seed(draw->second, s.device));
    std::copy(words.begin(), words.end(), s.numbers.end() - words.size());
    remember_draw(s, draw->second);
  }
  note_recorded(s);
  ++counters().ops;
  for (const auto slot : last_uses_[i]) values[slot].reset();
}

void CapturedGraph::replay() const {
  refuse_in_capture(ops_.device, "replay()");
  if (ops_.nodes.empty()) return;
  for (const auto& in : inputs_)
    restore_layout(in.storage, ops_.slots[in.slot]->layout, ops_.slots[in.slot]->nbytes);
  std::string wrong;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    Trace* trace = current_trace(ops_.device);
    do flush(trace, lock, kReplay);
    while (settle_inputs(*trace, lock));
    wrong = mismatch();
    if (wrong.empty()) {
      const auto most = static_cast<size_t>(mode().max_ops ? mode().max_ops : INT64_MAX);
      auto values = input_values(*trace);
      for (size_t i = 0; i < ops_.nodes.size(); ++i) {
        record_node(i, *trace, values);
        if (i + 1 == ops_.nodes.size()) values.clear();
        if (trace->current.nodes.size() >= most) flush(trace, lock, kReplay);
      }
      flush(trace, lock, kReplay);
    }
  }
  if (!wrong.empty()) raise_graph_error(wrong);
}

py::dict CapturedGraph::exported() const {
  return export_segment(ops_, Cut{}, {}, {}, ops_.compiled_in);
}

#ifdef TPU_HAS_GRAPHS

namespace {

std::atomic<uint64_t> g_next_pool{1};

// A graph of `torch.accelerator.Graph`.
struct GraphImpl final : at::GraphImplInterface {
  explicit GraphImpl(const at::GraphImplArgs&) {}
  GraphImpl(const GraphImpl&) = delete;
  ~GraphImpl() override {
    if (trace_) end_capture(trace_);
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    if (graph_ || !invalid_.empty())
      raise_graph_error("The graph was captured already; reset() makes it empty again.");
    trace_ = begin_capture(current_device());
    if (!trace_) raise_graph_error("A graph is being captured on this thread and device already.");
    // Memory is shared in any case: a replay makes new buffers, and old ones go back at once.
    pool_ = pool == c10::MempoolId_t{0, 0} ? c10::MempoolId_t{0, g_next_pool++} : pool;
  }
  void capture_end() override {
    if (!trace_) raise_graph_error("No graph is being captured: capture_begin() comes before it.");
    std::tie(graph_, invalid_) = end_capture(std::exchange(trace_, nullptr));
    py::gil_scoped_acquire gil;
    // In the `__exit__` of a block that raised, the error of the block is the one to see.
    if (!invalid_.empty() && !is_handling_exception()) raise_graph_error(invalid_);
  }
  void instantiate() override { require(); }
  void replay() override { require().replay(); }
  void reset() override {
    if (trace_) end_capture(std::exchange(trace_, nullptr));
    graph_.reset();
    invalid_.clear();
  }
  c10::MempoolId_t pool() const override {
    if (!pool_.second) raise_graph_error("The graph has no pool before capture_begin().");
    return pool_;
  }
  void enable_debug_mode() override { debug_ = true; }
  void debug_dump(const std::string& path) override {
    if (!debug_) raise_graph_error("debug_dump() needs enable_debug_mode() before the capture.");
    const auto& graph = require();
    py::gil_scoped_acquire gil;
    callback("dump_graph")(path, graph.exported());
  }

 private:
  static bool is_handling_exception() {
    PyObject* handled = PyErr_GetHandledException();
    const bool is_one = handled && handled != Py_None;
    Py_XDECREF(handled);
    return is_one;
  }
  const CapturedGraph& require() const {
    if (trace_)
      raise_graph_error("The graph is still being captured: capture_end() comes before it.");
    if (!invalid_.empty()) raise_graph_error("The capture of this graph failed: " + invalid_);
    if (!graph_)
      raise_graph_error("Nothing was captured: capture_begin() and capture_end() come first.");
    return *graph_;
  }

  Trace* trace_ = nullptr;  // while it captures
  std::unique_ptr<CapturedGraph> graph_;
  std::string invalid_;
  c10::MempoolId_t pool_{0, 0};
  bool debug_ = false;
};

}  // namespace

}  // namespace tpu

namespace at {
// The name of the device, which PyTorch looks it up by.
REGISTER_GRAPH_IMPL(TPU, tpu::GraphImpl)
}  // namespace at

namespace tpu {

#endif

}  // namespace tpu

// Captured graphs (`torch.accelerator.Graph`): ops that are recorded once, without being run, and run at each
// replay on what their storages hold by then.
//
// While a trace captures it is not cut. A storage that was there before is known by the value that it held,
// so that a slot of the segment stands for one storage; at the end of the capture it gets that value back.
#pragma once

#include "recorder/trace.h"

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tpu {

// Ops of a capture, and the storages that they read and write.
class CapturedGraph {
 public:
  // Records the ops again and runs them, as the calling thread's mode has it.
  void replay() const;
  // The ops as Python sees them. Needs the GIL.
  py::dict exported() const;

 private:
  friend class Capture;
  struct Input {
    uint32_t slot;
    c10::Storage storage;
  };
  // A storage that a slot's value is put into, while it lives.
  struct Output {
    Cell* cell;
    uint32_t generation;
    uint32_t slot;
    // Where it is older than the capture.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  };

  void record_node(size_t i, Trace& trace, std::vector<ValuePtr>& values) const;
  std::string mismatch() const;
  bool settle_inputs(const Trace& trace, Lock& lock) const;
  std::vector<ValuePtr> input_values(Trace& trace) const;

  Segment ops_;  // its values are layouts alone
  std::vector<Input> inputs_;
  std::vector<Output> outputs_;
  std::unordered_map<uint32_t, std::vector<size_t>> outputs_of_;  // by slot
  std::unordered_map<size_t, at::Generator> draws_;               // of random nodes
  std::unordered_map<size_t, uint32_t> words_;    // slots of the words of checked nodes
  std::vector<std::vector<uint32_t>> last_uses_;  // slots, by the node that needs them last
};

// What a trace keeps while it captures. Needs g_mutex.
class Capture {
 public:
  explicit Capture(const Trace& trace) : trace_(trace) {}

  // An op is about to read or write a storage.
  void touch(Cell* cell, const at::Tensor& t);
  // A storage was made.
  void add_own(const Cell* cell) { own_[cell] = cell->generation; }
  bool is_own(const Cell* cell) const {
    const auto it = own_.find(cell);
    return it != own_.end() && it->second == cell->generation;
  }
  // The node that was recorded last drew from a generator.
  void add_draw(const at::Generator& generator);
  // The graph cannot be replayed, for this reason; the first counts.
  void invalidate(const std::string& why) {
    if (invalid_.empty()) invalid_ = why;
  }
  const std::string& invalid() const { return invalid_; }
  // Gives storages and generators what they had before, and makes a graph of the trace's segment.
  std::unique_ptr<CapturedGraph> end(Segment&& segment);

 private:
  struct FromBefore {
    c10::Storage storage;
    Cell* cell;
    ValuePtr value;
  };
  struct Draws {
    uint64_t seed, first, next;  // offsets
  };
  ValuePtr copy_of(Value& v);

  const Trace& trace_;
  std::vector<FromBefore> storages_;
  std::unordered_map<const Cell*, size_t> known_;       // of `storages_`
  std::unordered_map<const Value*, size_t> by_value_;   // the storage that a value stands for
  std::unordered_map<const Cell*, uint32_t> own_;       // generations of storages of the capture
  std::unordered_map<size_t, at::Generator> draws_;     // by node
  std::vector<std::pair<at::Generator, Draws>> drawn_;  // what each generator was at
  std::string invalid_;
};

// Whether any trace captures; without a lock.
bool any_captures();
// Whether ops that this thread records on a device are captured.
bool is_capturing(int16_t device);
// Raises if they are: what the host is about to do cannot be part of a graph. g_mutex must not be held.
void refuse_in_capture(int16_t device, const char* what);
// Raises for a value that a capture is to compute. Lets go of the lock.
[[noreturn]] void refuse_captured_value(Lock& lock);
// Raises GraphCaptureError. g_mutex must not be held.
[[noreturn]] void raise_graph_error(const std::string& what);
// A storage of this thread was made.
void note_allocated(const Cell* cell);
// Whether the capture of this thread made it.
bool is_made_in_capture(const Cell* cell);

// Begins a capture on this thread's trace of a device; null where one captures already.
Trace* begin_capture(int16_t device);
// Ends it: the graph, or why there is none.
std::pair<std::unique_ptr<CapturedGraph>, std::string> end_capture(Trace* trace);

}  // namespace tpu

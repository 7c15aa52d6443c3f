// Traces of recorded ops, and the programs that run them.
//
// A trace is a list of nodes; its current segment is everything recorded since the last cut. Cutting
// a trace ("flush") decides which results are still alive, finds the program for the segment by a
// process-stable key, runs it and stores the results in their Values. Only an unknown key enters
// Python's compiler.
#pragma once

#include "recorder/cut_points.h"
#include "recorder/former.h"
#include "recorder/tiering.h"
#include "recorder/varying_loops.h"
#include "runtime/hash.h"
#include "runtime/python.h"
#include "runtime/source_location.h"
#include "values/value.h"

#include <optional>
#include <unordered_map>
#include <vector>

namespace tpu {

class Capture;  // capture.h

// The array that a lifted number travels in.
enum class Pack : uint8_t { F32, F64, I32, I64 };
constexpr int kPacks = 4;

// One recorded form of an op: overload, geometry and dtypes of inputs, static arguments.
struct Signature {
  enum class Kind : uint8_t { Record, Python, Resize, Combine };
  Hash128 hash;
  Kind kind = Kind::Record;
  std::vector<std::optional<Layout>> fresh;  // new outputs, lists flattened; nullopt: undefined
  bool is_checked = false;                   // the last of `fresh` is a word (checks.h)
  std::vector<uint32_t> list_sizes;          // lengths of Tensor[] returns, in order
  std::vector<int64_t> constants;            // int returns, in order
  std::vector<Pack> packs;                   // one a lifted number
  std::vector<uint8_t> compiled_in;          // numbers that start as constants of the program
  mutable py::object plan;  // Python's recipe for lowering the node, or the handler
};

struct Node {
  const Signature* signature;
  uint32_t refs;  // first of its slots in Segment::refs: operands, then outputs
  uint32_t operands;
  uint32_t outputs;
  uint32_t numbers;  // first of its lifted numbers in Segment::numbers
  Line line;
};

constexpr uint32_t kNoSlot = ~0u;

struct Segment {
  std::vector<Node> nodes;
  std::vector<uint32_t> refs;
  std::vector<ValuePtr> slots;       // every value that a node reads or makes, by first appearance
  std::vector<uint8_t> is_input;     // per slot
  std::vector<uint64_t> numbers;     // bits of a double or an int64
  std::vector<Pack> packs;           // per number
  std::vector<uint8_t> compiled_in;  // per number
  std::unordered_map<const Value*, uint32_t>
      shared;          // slots of inputs that another trace reads, too
  FormerState former;  // of what the segment writes
  std::vector<uint64_t>
      correlations;  // per node, while a profile is taken: the row that recorded it
  std::vector<std::pair<uint32_t, uint32_t>> words;  // nodes that are checked, slots of their words
  Hasher hasher;
  int16_t device = 0;
  uint64_t stamp = 0;
  const char* cut = "";  // why it was cut

  void clear();  // keeps the memory of its vectors
};

struct Trace {
  explicit Trace(int16_t device);
  ~Trace();
  int16_t device;
  Segment current;
  CutPoints cut_points;
  VaryingLoops varying_loops;
  Tiering tiering;
  const char* cut_due = nullptr;     // why the next op starts a new segment
  std::unique_ptr<Capture> capture;  // while its ops are captured: it is not cut then
  void restart();
  uint32_t input_slot(ValuePtr v);
  uint32_t output_slot(ValuePtr v);
  void resume(Segment&& s);  // goes on with a segment that was taken off

 private:
  void enter(Value& v, uint32_t slot);
};

// A cut that leaves the tiers' segment open: a CPU kernel needs what was recorded.
inline constexpr char kForHost[] = "a CPU kernel's operand";
// The thread reads a value: a segment of the host tier ends.
void end_host_segment(int16_t device);

// Runs what `trace` has recorded. `lock` holds g_mutex; it is released while Python runs.
void flush(Trace* trace, Lock& lock, const char* cut);
void flush_all(int16_t device, const char* cut);  // every thread's traces; -1: every device

// Makes `v` Ready (or Host): flushes its trace, waits for another thread's run, raises its error.
void settle(const ValuePtr& v, Lock& lock, const char* cut);
// Gives a segment that could not be run back to its trace, to be run at the next cut; false where the
// trace has gone on or ended. The GIL may be held.
bool put_back(Trace* trace, Segment& s);
// Wakes who waits in `settle`, once values of a segment have changed their state. Needs g_mutex.
void notify_settled();
// Until another thread has changed the state of a value; looks for signals.
void wait_for_change(Lock& lock);

int64_t pending_bytes(int16_t device);
// What storages held before the recorded segments, and those that this thread runs, that write them. Needs
// g_mutex.
std::unordered_map<const Cell*, ValuePtr> former_values();

struct Counters {
  Counter ops, segments, signatures, substitutions, pieces, host_ops;  // g_mutex
  Counter executions, hits;                                            // the GIL
};
Counters& counters();

}  // namespace tpu

// History of device memory: what was allocated and freed, when and by which line (PyTorch's
// `_record_memory_history`). Off, it costs the read of a flag an allocation.
#pragma once

#include "runtime/memory_stacks.h"
#include "values/value.h"

#include <atomic>
#include <string>

namespace tpu {

struct Segment;

enum class MemoryEvent : uint8_t {
  Allocation,
  Free,
  Donation,
  Temporaries,
  TemporariesEnd,
  OutOfMemory,
  Snapshot,
};

extern std::atomic<bool> g_records_memory;
inline bool records_memory() { return g_records_memory.load(std::memory_order_relaxed); }

// A value is made: its stack, where allocations are recorded with theirs.
StackId stack_of_allocation();
// A value has memory from now on, or none any more. `donated`: a program took it for its results.
void record_allocation(const Value& v);
void record_free(const Value& v, bool donated);
// An allocation or program of so many bytes found only `free_bytes`.
void record_out_of_memory(int16_t device, int64_t needed, int64_t free_bytes);

// Gives values that were recorded before the history began the line of their op.
void complete_stacks(const Segment& s);

// Temporaries of a program, from its start until its results are values. XLA knows how many bytes they are;
// the lines are those of the largest results of ops that the program does not return.
class TemporariesRecord {
 public:
  TemporariesRecord(const Segment& s, at::ArrayRef<uint32_t> live, int64_t nbytes);
  ~TemporariesRecord();
  TemporariesRecord(const TemporariesRecord&) = delete;

 private:
  uint64_t address_ = 0;
  int64_t nbytes_;
  int16_t device_;
};

// (line, bytes) of the largest results of a segment's ops, but for those that `live` lists; the largest first.
// Needs the GIL.
py::list largest_intermediates(const Segment& s, at::ArrayRef<uint32_t> live, size_t most);

void register_memory_history(py::module_& m);

}  // namespace tpu

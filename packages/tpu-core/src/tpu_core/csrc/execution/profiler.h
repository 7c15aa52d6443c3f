// Raw events of a profile: ops that CPU kernels ran and programs that were launched, each with the row of
// torch.profiler that was open and the user's line. Off, an op costs one relaxed load.
#pragma once

#include "recorder/trace.h"

#include <atomic>
#include <chrono>

namespace tpu {

extern std::atomic<bool> g_profiling;
inline bool is_profiling() { return g_profiling.load(std::memory_order_relaxed); }

// The clock of the profiler's rows: nanoseconds since the epoch.
int64_t profiler_time();

// The id of torch.profiler's innermost row on this thread, or 0.
uint64_t current_correlation();
void push_correlation(uint64_t id);
void pop_correlation();

// A CPU kernel that ran an op. g_mutex is not held.
void note_host_op(const std::string& name, const Line& line, int16_t device, int64_t start);
// A copy between host and device that began at `start`; nothing where nothing is profiled.
void note_transfer(bool is_to_device, int64_t bytes, int16_t device, int64_t start);
// `profiler_time()` while a profile is taken, else 0.
inline int64_t transfer_time() { return is_profiling() ? profiler_time() : 0; }
// A node was appended to the segment: remembers the row that recorded it.
void note_recorded(Segment& s);

// A program that is about to be launched; ended by its destructor. Holds the GIL.
class Launch {
 public:
  Launch(const Segment& s, py::handle info);
  Launch(const Launch&) = delete;
  ~Launch();

 private:
  int64_t index_ = -1;
  uint64_t profile_ = 0;
};

// Begins a profile, ends one. What was noted stays until `take_profile` or the next begins.
void begin_profile();
void end_profile();
// {"host_ops": [...], "launches": [...], "transfers": [...]}, as `tpu_core.profiler.events` reads them. Needs the GIL.
py::dict take_profile();

void register_profiler(py::module_& m);

}  // namespace tpu

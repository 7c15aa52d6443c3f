// Chooses between the tiers of the CPU platform, a segment at a time (TPU_TIERS=auto): CPU kernels at first,
// a program once the time that the kernels took would have paid for it, and the faster of the two from then on.
//
// A segment is what lies between two cuts. Which one begins is guessed from those before it; a guess decides
// what an op costs, never what it computes.
#pragma once

#include "runtime/hash.h"
#include "runtime/locks.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace tpu {

// What is known of a segment.
struct SegmentHistory;

// A clock for kernels, of which two readings would cost as much as a small one by the system's.
inline uint64_t kernel_clock() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

class Tiering {
 public:
  enum class Choice : uint8_t { Host, Record, Cut };

  // What to do with the next op, of that key (tier_key.h): run it on the host, record it, or first run what
  // was recorded and ask again.
  Choice choose(uint64_t op);
  void recorded(uint64_t op) { ops_.push_back(op); }
  // An op is about to run on the host; where it failed it was none.
  void runs_on_host(uint64_t op) { ops_.push_back(op); }
  void failed(uint64_t op) {
    if (!ops_.empty() && ops_.back() == op) ops_.pop_back();
  }
  // It took so long, by `kernel_clock`; without g_mutex. Of two threads at once one may not count.
  void took(uint64_t ticks) {
    ticks_.store(ticks_.load(std::memory_order_relaxed) + ticks, std::memory_order_relaxed);
  }
  // The segment ends before the next op.
  void end_after_op() { is_ending_ = true; }
  // The segment ends here.
  void end();
  // Its ops are being recorded for its program.
  bool is_recording() const { return expected_ != nullptr; }
  size_t size() const { return ops_.size(); }

 private:
  using Clock = std::chrono::steady_clock;

  double kernel_seconds(Clock::time_point now);

  std::vector<uint64_t> ops_;
  std::atomic<uint64_t> ticks_{0};  // of CPU kernels in the segment
  bool is_ending_ = false;
  // The process's CPU time when it was last read, and what was counted since.
  double cpu_read_ = 0, counted_ = 0;
  std::shared_ptr<SegmentHistory> expected_;
  bool was_recorded_ = false;       // from its first op on
  uint64_t before_ = 0, last_ = 0;  // keys of the two segments before
};

// How many times the cost of a program CPU kernels may take before it is made.
void set_patience(double times);
// A program of so many ops, of so many forms, took so long to compile: what is expected of the next follows.
void note_compile(size_t forms, size_t ops, double seconds);

// Segments that went over to programs, and those that went back.
struct TierCounters {
  Counter promotions, demotions;  // g_mutex
};
TierCounters& tier_counters();

}  // namespace tpu

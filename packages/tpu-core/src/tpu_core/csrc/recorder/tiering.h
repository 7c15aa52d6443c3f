// Chooses between the tiers of the CPU platform, a segment at a time (TPU_TIERS=auto): CPU kernels at first,
// a program once the time that the kernels took would have paid for it, and the faster of the two from then on.
//
// A segment is what lies between two cuts. Which one begins is guessed from those before it; a guess decides
// what an op costs, never what it computes.
#pragma once

#include "runtime/hash.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace tpu {

// What is known of a segment.
struct SegmentHistory;

class Tiering {
 public:
  enum class Choice : uint8_t { Host, Record, Cut };

  // What to do with the next op, of that signature: run it on the host, record it, or first run what was
  // recorded and ask again.
  Choice choose(uint64_t op);
  void recorded(uint64_t op) { ops_.push_back(op); }
  void ran_on_host(uint64_t op, double seconds);
  // The segment ends here.
  void end();
  // Its ops are being recorded for its program.
  bool is_recording() const { return expected_ != nullptr; }
  size_t size() const { return ops_.size(); }

 private:
  using Clock = std::chrono::steady_clock;

  std::vector<uint64_t> ops_;
  double seconds_ = 0;       // of CPU kernels in the segment
  double ended_at_cpu_ = 0;  // the process's CPU time at the end of the segment before
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
  uint64_t promotions = 0, demotions = 0;
};
TierCounters& tier_counters();

}  // namespace tpu

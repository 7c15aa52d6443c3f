// Loops whose number of rounds varies from one read or optimizer step to the next, as those that decode
// texts of other lengths, and of a recurrence and its backward pass. Recorded as a whole, each number of
// rounds is a program of its own; cut once a round, the rounds share one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tpu {

class VaryingLoops {
 public:
  // Takes in an op, by a hash without its sizes, that was recorded. Whether the segment ends here.
  bool after_op(uint64_t op);
  // What was recorded since the last forced cut (a stretch) ended.
  void forced_cut();

 private:
  static constexpr size_t kHistory = 1 << 12;  // the longest period
  static constexpr size_t kLoops = 16;         // of a stretch
  static constexpr size_t kStretches = 32;     // forms that are remembered
  static constexpr size_t kPrefix = 16;        // ops by which a stretch with a cut point is known
  static constexpr size_t kLengths = 3;        // of a loop that varies
  static constexpr size_t kWays = 4;           // places that a window may have
  // Ops of a round that is cut: sending a segment off costs as much as recording some 20 ops, and several
  // rounds a segment would leave other rests. A stretch in which the length of a loop of shorter rounds
  // varies stays whole: it is another program a length in any case.
  static constexpr size_t kLeast = 16;
  static constexpr size_t kShort = 4;

  struct Seen {
    uint32_t tag = 0;
    uint32_t position = 0;
  };
  struct Loop {
    uint64_t point = 0;  // the window after which a round is cut
    uint32_t period = 0;
    std::vector<uint32_t> lengths;
  };
  struct Stretch {
    uint64_t form = 0;  // its windows, each once
    std::vector<Loop> loops;
  };
  struct Point {
    uint64_t window = 0;
    uint64_t prefix = 0;
  };
  struct Tables {
    std::array<uint64_t, kHistory> windows{};
    std::array<Seen, 2 * kHistory> last_seen{};
    std::array<Stretch, kStretches> stretches;
    std::array<Point, kStretches> points{};
  };

  Seen& last_seen(uint64_t window);
  bool is_point(uint64_t window) const;
  void end_run();
  void compare();
  void learn(uint64_t window);

  std::unique_ptr<Tables> tables_;  // made at the first op
  uint64_t rolling_ = 0;
  uint64_t form_ = 0, prefix_ = 0;
  uint32_t position_ = 0;
  uint32_t begin_ = 0;                 // position before the stretch
  uint32_t period_ = 0, run_ = 0;      // as in `CutPoints`
  std::vector<Loop> loops_;            // of this stretch, each with one length
  size_t stretches_ = 0, points_ = 0;  // that were ever added
};

}  // namespace tpu

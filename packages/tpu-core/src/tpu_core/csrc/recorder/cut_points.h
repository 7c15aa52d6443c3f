// Where a stream of recorded ops that no read and no optimizer step divides is cut.
//
// Cutting every N ops would cut a loop at another place in each round. What was recorded decides
// instead: each op is seen with the seven before it (a window), a loop is found by its windows that come
// back, and is cut after one window of its body, the same wherever recording began.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tpu {

inline constexpr char kCutAtRepetition[] = "repetition";
inline constexpr char kCutAtBound[] = "size bound";

inline uint64_t mixed(uint64_t x) {
  x *= 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 32);
}

// The least of n windows among those that are there once; of all where none is.
template <typename Window>
uint64_t least_once(size_t n, Window window) {
  std::vector<uint64_t> round(n);
  for (size_t k = 0; k < n; ++k) round[k] = window(k);
  std::sort(round.begin(), round.end());
  for (size_t k = 0; k < n; ++k) {
    const bool again =
        (k > 0 && round[k - 1] == round[k]) || (k + 1 < n && round[k + 1] == round[k]);
    if (!again) return round[k];
  }
  return round[0];
}

class CutPoints {
 public:
  // Takes in an op that was recorded as the n-th of its segment, of at most `bound`. Whether the segment
  // ends here: kCutAtRepetition, kCutAtBound or null.
  const char* after_op(uint64_t signature, size_t n, size_t bound);
  // What was recorded ended for another reason: a loop that always ends so needs no cut of ours.
  void forced_cut();

 private:
  // Windows that are remembered: the longest period of a loop that is found.
  static constexpr size_t kHistory = 1 << 13;
  static constexpr size_t kPoints = 32;

  struct Seen {
    uint32_t tag = 0;
    uint32_t position = 0;
  };
  struct Tables {
    std::array<uint64_t, kHistory> windows{};    // by position
    std::array<Seen, 2 * kHistory> last_seen{};  // by hash of the window
    std::array<uint64_t, kPoints> bound_cuts{};  // hashes of segments that were cut at the bound
  };

  bool is_point(uint64_t window) const;
  void learn(uint64_t window);
  void learn_loop(size_t bound);
  void learn_from_segment(size_t n, size_t least);

  std::unique_ptr<Tables> tables_;  // made at the first op
  uint64_t rolling_ = 0;
  uint32_t position_ = 0;
  uint32_t last_forced_ = 0;  // position of the last forced cut
  uint32_t period_ = 0;   // how far back the same windows were seen since a forced cut; 0: nowhere
  uint32_t run_ = 0;      // ops for which that has held
  bool in_loop_ = false;  // it has for so long that the loop's cut point is known
  uint64_t own_ = 0;      // that cut point
  std::array<uint64_t, kPoints> points_{};  // cut points of all loops, the oldest replaced first
  uint64_t filter_ = 0;                     // bits of the points
  size_t learned_ = 0, bound_cuts_ = 0;     // how many were ever added
};

}  // namespace tpu

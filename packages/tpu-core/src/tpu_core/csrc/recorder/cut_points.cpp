#include "recorder/cut_points.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tpu {
const char* CutPoints::after_op(uint64_t signature, size_t n, size_t bound) {
  if (!tables_) tables_ = std::make_unique<Tables>();
  auto& t = *tables_;
  // Each op moves the ones before it up by a byte: after eight it has left the word.
  rolling_ = (rolling_ << 8) + mixed(signature);
  const uint64_t window = mixed(rolling_);
  const uint32_t i = ++position_;
  auto& seen = t.last_seen[window & (t.last_seen.size() - 1)];
  const auto tag = static_cast<uint32_t>(window >> 32);
  if (period_ && t.windows[(i - period_) & (kHistory - 1)] == window) {
    ++run_;
  } else {
    // The latest sight of a window may be in a loop of the body; the first op after that loop has the
    // distance of the outer one. An earlier run of the same loop, before a forced cut, says nothing.
    const uint32_t distance = i - seen.position;
    const uint32_t most = std::min<uint32_t>(kHistory, i - last_forced_);
    period_ = seen.tag == tag && distance < most ? distance : 0;
    run_ = period_ ? 1 : 0;
    in_loop_ = false;
  }
  seen = {tag, i};
  t.windows[i & (kHistory - 1)] = window;

  // Sending a segment off costs as much as recording some 20 ops; compiling it, as running it thousands of
  // times. The layers of a model are a loop, too, but one that the end of the step cuts: it takes half of
  // what a segment may hold to make a loop.
  const size_t least = bound / 8;
  if (!in_loop_ && period_ && run_ >= period_ && run_ >= bound / 2) learn_loop(bound);
  if (in_loop_ && window == own_ && (n >= least || period_ >= least)) return kCutAtRepetition;
  if (n >= least && is_point(window) && (!in_loop_ || period_ > bound)) return kCutAtRepetition;
  if (n < bound) return nullptr;
  if (!in_loop_) learn_from_segment(n, least);
  return kCutAtBound;
}

void CutPoints::forced_cut() {
  last_forced_ = position_;
  period_ = run_ = 0;
  in_loop_ = false;
}

bool CutPoints::is_point(uint64_t window) const {
  return (filter_ >> (window & 63) & 1) &&
      std::find(points_.begin(), points_.end(), window) != points_.end();
}

void CutPoints::learn(uint64_t window) {
  if (is_point(window)) return;
  points_[learned_++ % kPoints] = window;
  filter_ = 0;
  for (size_t i = 0; i < std::min(learned_, kPoints); ++i) filter_ |= 1ull << (points_[i] & 63);
}

// The least of the windows that a round has once, so that it is cut once, at the same place wherever
// the two rounds that were seen began.
void CutPoints::learn_loop(size_t bound) {
  auto window = [&](size_t k) { return tables_->windows[(position_ - k) & (kHistory - 1)]; };
  own_ = least_once(period_, window);
  // The cut points of loops in the body have served until this one was seen.
  if (period_ <= bound)
    for (size_t k = 0; k < period_; ++k)
      if (window(k) != own_) std::replace(points_.begin(), points_.end(), window(k), uint64_t{0});
  learn(own_);
  in_loop_ = true;
}

// A segment that reached the bound without a loop being found, as where rounds differ in length. If it
// repeats what was recorded before, but is not a segment that came before, it will come back at yet
// another place: from now on one of its windows is a cut point.
void CutPoints::learn_from_segment(size_t n, size_t least) {
  auto& t = *tables_;
  n = std::min(n, kHistory / 2);
  auto window = [&](size_t back) { return t.windows[(position_ - back) & (kHistory - 1)]; };
  uint64_t hash = 0;
  std::unordered_map<uint64_t, uint32_t> count;
  for (size_t k = 0; k < n; ++k) {
    hash = mixed(hash + window(k));
    ++count[window(k)];
  }
  if (std::find(t.bound_cuts.begin(), t.bound_cuts.end(), hash) != t.bound_cuts.end()) return;
  t.bound_cuts[bound_cuts_++ % kPoints] = hash;

  std::unordered_set<uint64_t> before;
  for (size_t k = n; k < kHistory && k < position_; ++k) before.insert(window(k));
  size_t known = 0;
  uint64_t best = ~0ull;
  for (size_t k = 0; k < n; ++k) {
    if (!before.count(window(k))) continue;
    ++known;
    // Not at the segment's start: the next one like it may begin there.
    if (k + least < n && count[window(k)] == 1) best = std::min(best, window(k));
  }
  if (known >= n / 2 && best != ~0ull) learn(best);
}

}  // namespace tpu

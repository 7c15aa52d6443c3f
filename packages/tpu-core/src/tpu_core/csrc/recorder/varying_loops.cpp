#include "recorder/varying_loops.h"

#include "recorder/cut_points.h"

#include <algorithm>

namespace tpu {

bool VaryingLoops::after_op(uint64_t op) {
  if (!tables_) tables_ = std::make_unique<Tables>();
  auto& t = *tables_;
  rolling_ = (rolling_ << 8) + mixed(op);
  const uint64_t window = mixed(rolling_);
  const uint32_t i = ++position_, length = i - begin_;
  if (length <= kPrefix) prefix_ = mixed(prefix_ + op);
  auto& seen = last_seen(window);
  const uint32_t distance = i - seen.position;
  const bool is_known = distance < length && distance < kHistory;
  if (!is_known) form_ = mixed(form_ + window);
  if (period_ && t.windows[(i - period_) & (kHistory - 1)] == window) {
    ++run_;
  } else {
    end_run();
    period_ = is_known ? distance : 0;
    run_ = period_ ? 1 : 0;
  }
  seen.position = i;
  t.windows[i & (kHistory - 1)] = window;
  return length > kPrefix && is_point(window);
}

bool VaryingLoops::is_point(uint64_t window) const {
  if (!points_) return false;
  const auto& points = tables_->points;
  return std::any_of(points.begin(), points.end(), [&](const Point& p) {
    return p.window == window && p.prefix == prefix_;
  });
}

// The place of a window that was seen in this stretch, else of one that was not or the longest ago.
VaryingLoops::Seen& VaryingLoops::last_seen(uint64_t window) {
  auto& table = tables_->last_seen;
  const auto tag = static_cast<uint32_t>(window >> 32);
  Seen* oldest = nullptr;
  for (size_t k = 0; k < kWays; ++k) {
    auto& seen = table[(window + k) & (table.size() - 1)];
    if (seen.tag == tag && seen.position > begin_) return seen;
    if (!oldest || seen.position < oldest->position) oldest = &seen;
  }
  *oldest = {tag, 0};
  return *oldest;
}

void VaryingLoops::forced_cut() {
  if (position_ == begin_) return;
  end_run();
  compare();
  loops_.clear();
  rolling_ = form_ = prefix_ = 0;
  begin_ = position_;
}

// Learns the cut point of each loop that had other lengths in earlier stretches of this form.
void VaryingLoops::compare() {
  auto& stretches = tables_->stretches;
  auto known = std::find_if(stretches.begin(), stretches.end(), [&](const Stretch& s) {
    return s.form == form_ &&
        std::equal(
               s.loops.begin(), s.loops.end(), loops_.begin(), loops_.end(),
               [](const Loop& a, const Loop& b) { return a.point == b.point; });
  });
  if (known == stretches.end()) {
    if (!loops_.empty()) stretches[stretches_++ % kStretches] = {form_, loops_};
  } else {
    auto& loops = known->loops;
    std::vector<uint64_t> vary;
    for (size_t k = 0; k < loops.size(); ++k) {
      auto& lengths = loops[k].lengths;
      const auto own = loops_[k].lengths[0];
      if (lengths.size() >= kLengths ||
          std::find(lengths.begin(), lengths.end(), own) != lengths.end())
        continue;
      lengths.push_back(own);
      if (lengths.size() == kLengths) vary.push_back(loops[k].point);
    }
    const bool stays = std::any_of(loops.begin(), loops.end(), [](const Loop& l) {
      return l.period < kLeast && l.lengths.size() > 1;
    });
    if (!stays)
      for (const auto point : vary) learn(point);
  }
}

// A loop has ended, after as many ops as had been there a round before. It is known by the least of its
// windows that a round has once, wherever the rounds that were seen began. One that is cut already, as
// another way through the same body was seen, needs no second cut.
void VaryingLoops::end_run() {
  const bool is_loop = period_ >= kShort && run_ >= period_ && loops_.size() < kLoops;
  const uint32_t period = period_, run = run_;
  period_ = run_ = 0;
  if (!is_loop) return;
  const auto window = [&](size_t k) {
    return tables_->windows[(position_ - 1 - k) & (kHistory - 1)];
  };
  for (size_t k = 0; k < period; ++k)
    if (is_point(window(k))) return;
  loops_.push_back({least_once(period, window), period, {run}});
}

void VaryingLoops::learn(uint64_t window) {
  tables_->points[points_++ % kStretches] = {window, prefix_};
}

}  // namespace tpu

#include "recorder/tiering.h"

#include "runtime/locks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace tpu {
namespace {

// What making a program costs, roughly, in seconds on one core (docs/adr/0025-tiers.md).
constexpr double kProgram = 0.15, kForm = 0.012, kOp = 0.006;
// What programs of this process took, over that: convolutions take several times as long.
std::atomic<double> g_dearer{1};
// A program is made once CPU kernels took so many times that: where it is of no use after all, it costs a
// third of what was spent. Tests set it.
std::atomic<double> g_patience{3};
// Programs that are slower than the kernels by more than chance are given up.
constexpr double kMargin = 1.1;
constexpr size_t kPeriods = 5;
constexpr size_t kMostSegments = 4096;
// Kernels of a segment that took less are believed to have run all the time; else the process's CPU time is
// asked for, which is a system call.
constexpr double kShortSegment = 1e-3;

}  // namespace

// Times between the ends of rounds.
class Periods {
 public:
  void add(double seconds) { latest_[n_++ % kPeriods] = seconds; }
  bool is_full() const { return n_ >= kPeriods; }
  double median() const {
    auto sorted = latest_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[kPeriods / 2];
  }

 private:
  std::array<double, kPeriods> latest_{};
  size_t n_ = 0;
};

struct SegmentHistory {
  std::vector<uint64_t> ops;  // once it has come twice
  double host_seconds = 0, cost = 0;
  uint64_t runs = 0;
  uint64_t program_runs = 0;
  bool is_given_up = false;
  Periods host, program;
  std::chrono::steady_clock::time_point ended;
  bool ended_on_host = false, ended_in_program = false;

  bool pays() const {
    return !is_given_up && !ops.empty() && host_seconds >= g_patience * g_dearer * cost;
  }
};

namespace {

using Histories = std::unordered_map<uint64_t, std::shared_ptr<SegmentHistory>>;
// Never destroyed: static destructors run after the interpreter's end. Guarded by g_mutex.
auto& g_segments = *new Histories();
auto& g_next = *new std::unordered_map<uint64_t, uint64_t>();  // by the two segments before

uint64_t mix(uint64_t a, uint64_t b) {
  Hasher h;
  h.add(a);
  h.add(b);
  return h.digest().lo;
}

// When the extension was loaded, by either clock.
const auto g_loaded = std::chrono::steady_clock::now();
const uint64_t g_loaded_ticks = kernel_clock();

double process_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double cost_of(size_t forms, size_t ops) {
  return kProgram + kForm * static_cast<double>(forms) + kOp * static_cast<double>(ops);
}

double cost_of(const std::vector<uint64_t>& ops) {
  return cost_of(std::unordered_set<uint64_t>(ops.begin(), ops.end()).size(), ops.size());
}

}  // namespace

void set_patience(double times) { g_patience = times; }

void note_compile(size_t forms, size_t ops, double seconds) {
  const double before = g_dearer, found = seconds / cost_of(forms, ops);
  g_dearer = std::max(1.0, (before + found) / 2);
}

TierCounters& tier_counters() {
  static TierCounters counters;
  return counters;
}

Tiering::Choice Tiering::choose(uint64_t op) {
  TPU_ASSERT_LOCKED();
  if (is_ending_) end();
  if (ops_.empty()) {
    const auto next = g_next.find(mix(before_, last_));
    if (next != g_next.end()) {
      const auto found = g_segments.find(next->second);
      if (found != g_segments.end() && found->second->pays() && found->second->ops.front() == op)
        expected_ = found->second;
    }
    was_recorded_ = expected_ != nullptr;
  }
  if (!expected_) return Choice::Host;
  if (ops_.size() < expected_->ops.size() && expected_->ops[ops_.size()] == op)
    return Choice::Record;
  if (ops_.size() == expected_->ops.size()) {
    end();
  } else {
    expected_ = nullptr;  // another segment than was expected: the host runs the rest
    was_recorded_ = false;
  }
  return Choice::Cut;
}

// Seconds of the segment's kernels. On a busy machine they take many times their work, and a program would
// take as many more.
double Tiering::kernel_seconds(Clock::time_point now) {
  const std::chrono::duration<double> since = now - g_loaded;
  const double tick = since.count() / static_cast<double>(kernel_clock() - g_loaded_ticks);
  const double spent = tick * static_cast<double>(ticks_.exchange(0, std::memory_order_relaxed));
  if (spent < kShortSegment) {
    counted_ += spent;
    return spent;
  }
  const double cpu = process_cpu_seconds();
  const double ran = cpu - std::exchange(cpu_read_, cpu) - std::exchange(counted_, 0);
  return std::clamp(ran, 0.0, spent);
}

void Tiering::end() {
  TPU_ASSERT_LOCKED();
  is_ending_ = false;
  if (ops_.empty()) return;
  uint64_t key = ops_.size();
  Hasher h;
  for (auto op : ops_) h.add(op);
  key = h.digest().lo;
  if (g_segments.size() >= kMostSegments && !g_segments.count(key)) {
    std::erase_if(g_segments, [](const auto& s) { return s.second->runs < 3; });
    if (g_segments.size() >= kMostSegments) g_segments.clear();
    g_next.clear();
  }
  auto& s = g_segments[key];
  if (!s) s = std::make_shared<SegmentHistory>();
  const auto now = Clock::now();
  const double spent = kernel_seconds(now);
  const bool in_program = was_recorded_ && expected_ && ops_.size() == expected_->ops.size();
  const double period = std::chrono::duration<double>(now - s->ended).count();
  if (in_program) {
    if (s->program_runs++ == 0) ++tier_counters().promotions;
    if (s->ended_in_program) s->program.add(period);
    if (s->program.is_full() && s->host.is_full() &&
        s->program.median() > kMargin * s->host.median()) {
      s->is_given_up = true;
      ++tier_counters().demotions;
    }
  } else if (!was_recorded_) {
    s->host_seconds += spent;
    if (s->ended_on_host) s->host.add(period);
    if (s->runs == 1) {
      s->ops = ops_;
      s->cost = cost_of(ops_);
    }
  }
  s->ended = now;
  s->ended_in_program = in_program;
  s->ended_on_host = !in_program && !was_recorded_;
  ++s->runs;
  if (g_next.size() >= kMostSegments * 4) g_next.clear();
  g_next[mix(before_, last_)] = key;
  before_ = std::exchange(last_, key);
  ops_.clear();
  expected_ = nullptr;
  was_recorded_ = false;
}

}  // namespace tpu

#include "execution/state_init.h"

#include "recorder/threads.h"

#include "execution/op_by_op.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tpu {
namespace {

// What became of a segment whose state ran first.
struct Divided {
  const Program* rest = nullptr;
  uint64_t times = 0;
  uint64_t segments = 0;  // how many there had been, the last time
};
// By the key of the whole; guarded by the GIL. Never destroyed: static destructors run after the
// interpreter's end.
auto& g_divided = *new std::unordered_map<Hash128, Divided, HashOfHash>();
constexpr size_t kMostDivided = 4096;

// Whether a segment that was divided comes again with no other in between: it is a loop's own, of one that
// makes a buffer in each round, and better off as one program. Where the rest came alone, too, or where
// other segments follow, as where a model generates, one more program would gain less than it costs.
bool is_better_whole(const Hash128& key) {
  const auto it = g_divided.find(key);
  if (it == g_divided.end()) return false;
  const auto& [rest, times, segments] = it->second;
  return !(rest && rest->runs > times) && counters().segments == segments + 1;
}

std::vector<size_t> new_state(const Segment& s, const Cut& c) {
  const bool may_have =
      std::any_of(s.nodes.begin(), s.nodes.end(), [](const auto& n) { return n.operands == 0; });
  if (c.program || c.failed || c.live.empty() || mode().inspect || !may_have) return {};
  if (is_better_whole(c.key)) return {};
  return callback("new_state")(export_segment(s, c, c.live, c.donated, s.compiled_in))
      .cast<std::vector<size_t>>();
}

// Does a part of the segment's work. What stops it keeps nobody waiting for the segment's values.
template <typename F>
auto working_for(Segment& s, F work) {
  try {
    return work();
  } catch (const PythonError& error) {
    if (!is_interruption(error)) give_up(s, error);  // else none of it has run
    throw;
  }
}

}  // namespace

void run_after_new_state(Segment& s, Cut& c) {
  const auto nodes = working_for(s, [&] { return new_state(s, c); });
  if (nodes.empty()) return run(s, c);
  std::vector<size_t> others;
  for (size_t i = 0; i < s.nodes.size(); ++i)
    if (!std::binary_search(nodes.begin(), nodes.end(), i)) others.push_back(i);
  const auto key = c.key;
  {
    Segment state;
    Cut of_state;
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      state = part_of(s, nodes);
      of_state = decide(state);
    }
    working_for(s, [&] { run(state, of_state); });
  }
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    auto former = std::move(s.former);
    former.hold();
    s = part_of(s, others);
    std::unordered_set<const Value*> held;
    for (const auto& v : s.slots) held.insert(v.get());
    for (auto& f : former.storages)
      if (held.count(f.hold.get())) f.hold.reset();  // so that it can be donated
    s.former = std::move(former);
    c = decide(s);
    --counters().segments;  // of the two that took its place
  }
  run(s, c);
  if (g_divided.size() >= kMostDivided) g_divided.clear();
  auto& divided = g_divided[key];
  divided.rest = c.program;
  ++divided.times;
  divided.segments = counters().segments;
}

void forget_new_state() { g_divided.clear(); }

}  // namespace tpu

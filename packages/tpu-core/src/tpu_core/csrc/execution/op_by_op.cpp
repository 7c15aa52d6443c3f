#include "execution/op_by_op.h"

#include "recorder/checks.h"
#include "values/memory.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace tpu {

Segment part_of(const Segment& s, const std::vector<size_t>& nodes) {
  TPU_ASSERT_LOCKED();
  Segment part;
  part.device = s.device;
  part.cut = s.cut;
  std::unordered_map<uint32_t, uint32_t> slots;  // of s, to those of the part
  auto slot_of = [&](uint32_t slot, bool is_input) {
    const auto [it, is_new] = slots.try_emplace(slot, static_cast<uint32_t>(part.slots.size()));
    if (is_new) {
      part.slots.push_back(s.slots[slot]);
      part.is_input.push_back(is_input);
    }
    return it->second;
  };
  for (const size_t i : nodes) {
    const auto& n = s.nodes[i];
    const auto* refs = s.refs.data() + n.refs;
    const auto* operands_end = refs + n.operands;
    const auto failed = std::find_if(
        refs, operands_end, [&](auto slot) { return s.slots[slot]->state == State::Failed; });
    if (failed != operands_end) {
      for (uint32_t k = 0; k < n.outputs; ++k)
        if (operands_end[k] != kNoSlot) s.slots[operands_end[k]]->fail(s.slots[*failed]->failure);
      continue;
    }
    Node node = n;
    node.refs = static_cast<uint32_t>(part.refs.size());
    node.numbers = static_cast<uint32_t>(part.numbers.size());
    part.hasher.add(n.signature->hash);
    for (uint32_t k = 0; k < n.operands; ++k) {
      part.refs.push_back(slot_of(refs[k], true));
      part.hasher.add(part.refs.back());
    }
    for (uint32_t k = 0; k < n.outputs; ++k)
      part.refs.push_back(operands_end[k] == kNoSlot ? kNoSlot : slot_of(operands_end[k], false));
    if (n.operands == 0 && !n.signature->plan)
      part.hasher.add(part.refs.back());  // as uninitialised memory is recorded
    const size_t last = i + 1 < s.nodes.size() ? s.nodes[i + 1].numbers : s.numbers.size();
    for (size_t k = n.numbers; k < last; ++k) {
      part.numbers.push_back(s.numbers[k]);
      part.packs.push_back(s.packs[k]);
      part.compiled_in.push_back(s.compiled_in[k]);
    }
    part.nodes.push_back(node);
    if (!s.correlations.empty())
      part.correlations.push_back(i < s.correlations.size() ? s.correlations[i] : 0);
  }
  return part;
}

namespace {

constexpr const char* kPartOfVarying = "part of a segment that varies";

std::vector<size_t> range(size_t begin, size_t end) {
  std::vector<size_t> all(end - begin);
  std::iota(all.begin(), all.end(), begin);
  return all;
}

// Runs a part; the error of an op that failed. An interruption, which leaves the part as it was, is
// returned once the part has run nevertheless.
std::optional<PythonError> run_part(Segment& part, Cut& c) {
  std::optional<PythonError> first;
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      run(part, c);
      return first;
    } catch (PythonError& error) {
      const bool again = is_interruption(error) && !attempt;
      if (is_interruption(error) && attempt) give_up(part, error);
      if (!first) first.emplace(std::move(error));
      if (!again) return first;
    }
  }
  return first;
}

}  // namespace

std::vector<std::vector<uint32_t>> last_uses(const Segment& s) {
  std::vector<uint32_t> last(s.slots.size(), 0);
  for (uint32_t i = 0; i < s.nodes.size(); ++i) {
    const auto& n = s.nodes[i];
    for (uint32_t k = 0; k < n.operands + n.outputs; ++k)
      if (const auto slot = s.refs[n.refs + k]; slot != kNoSlot) last[slot] = i;
  }
  std::vector<std::vector<uint32_t>> ending(s.nodes.size());
  for (uint32_t slot = 0; slot < last.size(); ++slot) ending[last[slot]].push_back(slot);
  return ending;
}

void run_apart(Segment& s, const PythonError& error) {
  const size_t n = s.nodes.size();
  std::vector<size_t> bounds{0, n / 2, n};
  // A lowering that fails says which node it is of.
  py::object known = py::getattr(py::handle(error.value), "node", py::none());
  if (!known.is_none()) {
    const auto at = known.cast<size_t>();
    bounds = {0, at, at + 1, n};
  }
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    Segment part;
    Cut c;
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      part = part_of(s, range(bounds[i], bounds[i + 1]));
      c = decide(part);
    }
    if (part.nodes.empty()) continue;
    try {
      run(part, c);
    } catch (const PythonError& again) {
      // The first error is the one to raise; this one is with the values that it concerns.
      if (is_interruption(again)) give_up(part, again);
    }
  }
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  notify_settled();
}

void run_others(Segment& s) {
  Segment part;
  Cut c;
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    part = part_of(s, range(0, s.nodes.size()));
    c = decide(part);
    notify_settled();
  }
  if (!part.nodes.empty()) run(part, c);
}

bool fits_in_pieces(const Segment& s) {
  if (!memory_is_checked()) return true;
  const auto ending = last_uses(s);
  std::unordered_set<const Value*> kept;
  for (const auto& f : s.former.storages) kept.insert(f.old);
  int64_t live = allocated_bytes(s.device), most = live;
  const int64_t before = live;
  for (size_t i = 0; i < s.nodes.size(); ++i) {
    const auto& n = s.nodes[i];
    for (uint32_t k = n.operands; k < n.operands + n.outputs; ++k)
      if (const auto slot = s.refs[n.refs + k]; slot != kNoSlot)
        live += static_cast<int64_t>(s.slots[slot]->nbytes);
    most = std::max(most, live);
    for (auto slot : ending[i]) {
      const auto& v = s.slots[slot];
      if (v.use_count() == 1 && !kept.count(v.get())) live -= static_cast<int64_t>(v->nbytes);
    }
  }
  return callback("check_allocation")(s.device, most - before, before, false).cast<bool>();
}

void run_in_pieces(Segment& s, const std::vector<Part>& parts) {
  std::optional<PythonError> first;
  const auto ending = last_uses(s);
  auto former = std::move(s.former);
  if (memory_is_checked()) former.hold();
  else former.clear();
  const FormerInUse former_in_use(former);
  const uint64_t first_launch = launches() + 1;
  const size_t count = parts.empty() ? s.nodes.size() : parts.size();
  const auto part_at = [&](size_t i) { return parts.empty() ? Part{i, i + 1, false} : parts[i]; };
  const auto combines = [&](const Part& p) {
    return p.end - p.begin == 1 && combines_words(s.nodes[p.begin]);
  };
  const auto words = [&] {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    for (size_t i = 0; i < count; ++i)
      if (const Part p = part_at(i); combines(p)) separate_words(s, s.nodes[p.begin]);
    return words_of(s);
  }();
  for (size_t i = 0; i < count; ++i) {
    const Part p = part_at(i);
    if (combines(p)) continue;
    Segment part;
    Cut c;
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      part = part_of(s, range(p.begin, p.end));
      for (size_t node = p.begin; node < p.end; ++node)
        for (auto slot : ending[node]) s.slots[slot].reset();
      if (!parts.empty()) part.cut = kPartOfVarying;
      if (!part.nodes.empty()) c = parts.empty() ? decide_piece(part) : decide(part);
      c.on_host = p.on_host;
    }
    if (part.nodes.empty()) continue;  // it reads what failed
    auto error = run_part(part, c);
    if (error && !first) first.emplace(std::move(*error));
    if (first && memory_is_checked() && is_out_of_memory(*first)) {
      give_up(s, *first);
      break;
    }
  }
  s.clear();
  if (first) s.former = std::move(former);
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  date_words(words, first_launch);
  notify_settled();
  if (first) throw std::move(*first);
}

std::vector<std::pair<Hash128, uint32_t>> missing_pieces(const Segment& s) {
  std::vector<std::pair<Hash128, uint32_t>> missing;
  std::unordered_set<Hash128, HashOfHash> seen;
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  for (uint32_t i = 0; i < s.nodes.size(); ++i) {
    if (combines_words(s.nodes[i])) continue;
    const auto key = missing_program(part_of(s, {i}));
    if (key && seen.insert(*key).second) missing.emplace_back(*key, i);
  }
  return missing;
}

}  // namespace tpu

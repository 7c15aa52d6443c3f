#include "execution/program.h"
#include "execution/state_init.h"
#include "recorder/threads.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <unordered_map>

namespace tpu {
namespace {

// Never destroyed: static destructors run after the interpreter's end.
using Forms = std::vector<std::unique_ptr<Program>>;  // of different constants
using Programs = std::unordered_map<Hash128, Forms, HashOfHash>;
auto& g_programs = *new Programs();
auto& g_by_content = *new std::unordered_map<Hash128, std::vector<Program*>, HashOfHash>();
// How often a program that has more outputs than needed served, by the key of the one that was not made.
auto& g_substituted = *new std::unordered_map<Hash128, int, HashOfHash>();

// Programs are of one device; their keys in the cache name none.
Hash128 on_device(const Hash128& key, const Cut& c) {
  Hasher h(key);
  h.add(static_cast<uint64_t>(c.device));
  return h.digest();
}

bool has_constants_of(const Program& p, const Segment& s) {
  for (size_t i = 0; i < s.numbers.size(); ++i)
    if (p.compiled_in[i] && p.constants[i] != s.numbers[i]) return false;
  return true;
}

Program* find_program(const Hash128& key, const Segment& s) {
  const auto forms = g_programs.find(key);
  if (forms == g_programs.end()) return nullptr;
  // The latest: it may have taken the place of another.
  const auto& all = forms->second;
  for (auto p = all.rbegin(); p != all.rend(); ++p)
    if (has_constants_of(**p, s)) return p->get();
  return nullptr;
}

// The numbers to compile in: those seen to vary become run-time inputs.
std::vector<uint8_t> constants_of(const Segment& s, const std::vector<Program*>& programs) {
  auto mask = s.compiled_in;
  for (auto* p : programs)
    for (size_t i = 0; i < mask.size(); ++i)
      if (!p->compiled_in[i] || p->constants[i] != s.numbers[i]) mask[i] = 0;
  return mask;
}

Hash128 key_of(const Cut& c, at::ArrayRef<uint32_t> outputs, at::ArrayRef<uint32_t> donated) {
  Hasher h(c.content);
  h.add_range(outputs);
  h.add_range(donated);
  return h.digest();
}

bool includes(at::ArrayRef<uint32_t> all, at::ArrayRef<uint32_t> some) {  // both ascending
  return std::includes(all.begin(), all.end(), some.begin(), some.end());
}

constexpr int64_t kSmallWaste = 1 << 16;
constexpr int kSubstitutions = 3;
constexpr size_t kFormsOfContent = 3, kCandidates = 16, kMostSubstituted = 4096;

// A program of the same ops that serves although nothing reads some of its results, or although it leaves
// memory alone that it could have taken: what is alive differs with when the interpreter frees reference
// cycles. One that takes memory which is still in use never serves. Null where the exact program is worth
// compiling: the same is wanted again and again, and serving it costs memory.
Program* substitute(
    const Segment& s, const Cut& c, const std::vector<Program*>& programs, bool at_any_cost) {
  Program* best = nullptr;
  int64_t least = 0;
  const int64_t live = bytes_of(s, c.live), donated = bytes_of(s, c.donated);
  for (auto* p : programs) {
    if (!includes(p->outputs, c.live) || !includes(c.donated, p->donated)) continue;
    if (!has_constants_of(*p, s)) continue;
    const int64_t waste = bytes_of(s, p->outputs) - live +
        std::min(donated - bytes_of(s, p->donated), live);  // what outputs could have taken
    if (best && waste >= least) continue;
    best = p;
    least = waste;
  }
  if (!best || at_any_cost || least < kSmallWaste) return best;
  if (g_substituted.size() > kMostSubstituted) g_substituted.clear();
  return ++g_substituted[on_device(c.key, c)] > kSubstitutions ? nullptr : best;
}

// What to compile for a segment. Where its ops were compiled several times for other live values, a
// program that serves them all, and more to come.
void choose_form(const Segment& s, Cut& c, const std::vector<Program*>& programs) {
  c.outputs = c.live;
  c.reused = c.donated;
  c.mask = constants_of(s, programs);
  const bool costly = g_substituted.count(on_device(c.key, c));
  const bool other_constants = g_programs.count(on_device(c.key, c));
  if (programs.size() < kFormsOfContent || costly || other_constants) return;
  for (auto* p : programs) {
    Slots all, common;
    std::set_union(
        c.outputs.begin(), c.outputs.end(), p->outputs.begin(), p->outputs.end(),
        std::back_inserter(all));
    std::set_intersection(
        c.reused.begin(), c.reused.end(), p->donated.begin(), p->donated.end(),
        std::back_inserter(common));
    c.outputs = std::move(all);
    c.reused = std::move(common);
  }
  c.key = key_of(c, c.outputs, c.reused);
}

}  // namespace

int64_t bytes_of(const Segment& s, at::ArrayRef<uint32_t> slots) {
  int64_t bytes = 0;
  for (auto i : slots) bytes += static_cast<int64_t>(s.slots[i]->nbytes);
  return bytes;
}

namespace {

std::atomic<bool> g_donates{true};

// All but the program.
Cut ends_of(const Segment& s) {
  Cut c;
  c.inputs.reserve(s.slots.size());
  const bool keep = mode().inspect || !g_donates;  // an inspection looks at the inputs, too
  for (uint32_t i = 0; i < s.slots.size(); ++i) {
    auto& v = s.slots[i];
    const bool only_here = v.use_count() == 1;
    if (s.is_input[i]) {
      if (v->state == State::Failed) c.failed = v->failure;
      c.inputs.push_back(i);
      if (only_here && !v->shared && !keep) c.donated.push_back(i);
    } else if (!only_here) {
      c.live.push_back(i);
    }
  }
  c.device = s.device;
  c.content = s.hasher.digest();
  c.key = key_of(c, c.live, c.donated);
  return c;
}

// Asks for a program with every result that takes no memory: it serves whatever is alive.
void choose_widest(const Segment& s, Cut& c, const std::vector<Program*>& programs) {
  c.outputs.clear();
  for (uint32_t i = 0; i < s.slots.size(); ++i)
    if (!s.is_input[i]) c.outputs.push_back(i);
  c.reused.clear();
  c.mask = constants_of(s, programs);
  c.key = key_of(c, c.outputs, c.reused);
}

}  // namespace

void set_donates(bool donates) { g_donates = donates; }

Cut decide(Segment& s) {
  TPU_ASSERT_LOCKED();
  Cut c = ends_of(s);
  c.program = find_program(on_device(c.key, c), s);
  if (!c.program) {
    auto& programs = g_by_content[on_device(c.content, c)];
    if (!mode().inspect) c.program = substitute(s, c, programs, false);
    if (c.program) ++counters().substitutions;
    else choose_form(s, c, programs);
  }
  ++counters().segments;
  return c;
}

Cut decide_piece(Segment& s) {
  TPU_ASSERT_LOCKED();
  Cut c = ends_of(s);
  c.is_piece = true;
  auto& programs = g_by_content[on_device(c.content, c)];
  c.program = substitute(s, c, programs, true);
  if (!c.program) choose_widest(s, c, programs);
  ++counters().pieces;
  return c;
}

std::optional<Hash128> missing_program(const Segment& s) {
  TPU_ASSERT_LOCKED();
  Cut c;
  c.device = s.device;
  c.content = s.hasher.digest();
  const auto& programs = g_by_content[on_device(c.content, c)];
  choose_widest(s, c, programs);
  for (auto* p : programs)
    if (p->donated.empty() && p->outputs == c.outputs && has_constants_of(*p, s))
      return std::nullopt;
  return c.key;
}

std::string hex(const Hash128& key) {
  char text[33];
  snprintf(
      text, sizeof text, "%016llx%016llx", (unsigned long long)key.lo, (unsigned long long)key.hi);
  return text;
}

Program* keep_program(const Cut& c, std::unique_ptr<Program> made) {
  auto* program = made.get();
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  g_programs[on_device(c.key, c)].push_back(std::move(made));
  g_substituted.erase(on_device(c.key, c));
  auto& programs = g_by_content[on_device(c.content, c)];
  if (programs.size() == kCandidates) programs.erase(programs.begin());
  programs.push_back(program);
  return program;
}

void retire_program(Cut& c) {
  // It stays alive, for the report, and because another thread may be running it.
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  auto& programs = g_by_content[on_device(c.content, c)];
  programs.erase(std::remove(programs.begin(), programs.end(), c.program), programs.end());
  c.outputs = c.program->outputs;
  c.reused = c.program->donated;
  c.mask = c.program->compiled_in;
  c.key = key_of(c, c.outputs, c.reused);
}

py::dict program_runs() {
  // The GIL keeps the counts as they are; g_mutex is not held where Python's code may run.
  std::vector<const Program*> programs;
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    for (const auto& [key, same] : g_programs)
      for (const auto& p : same) programs.push_back(p.get());
  }
  // Sizes that one padded executable serves are programs of one key.
  std::unordered_map<std::string, std::pair<uint64_t, double>> totals;
  for (const auto* p : programs) {
    auto& total = totals[p->info.attr("key").cast<std::string>()];
    total.first += p->runs;
    total.second += p->seconds;
  }
  return py::cast(totals);
}

void clear_programs() {
  forget_new_state();
  Programs dropped;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    dropped.swap(g_programs);
    g_by_content.clear();
    g_substituted.clear();
  }
}

}  // namespace tpu

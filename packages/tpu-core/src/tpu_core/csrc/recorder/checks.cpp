#include "recorder/checks.h"

#include "recorder/threads.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

namespace tpu {
namespace {

std::atomic<int> g_level{0};
std::atomic<uint64_t> g_launched{0};
std::atomic<size_t> g_pending{0};  // of all devices

struct Checked {
  const Signature* signature;
  Line line;
};

// A word, and the nodes that it is of.
struct Word {
  ValuePtr value;
  std::vector<Checked> nodes;
  bool is_bad = false;  // it was looked at
};

// Words that nobody has looked at, by device, in the order of their programs; g_mutex. Never destroyed:
// static destructors run after the interpreter's end.
auto& g_words = *new std::array<std::deque<Word>, 128>();
std::array<size_t, 128> g_sweep_at{};  // g_mutex
constexpr size_t kSweepAt = 64;

// Signatures of the nodes that make one word of several, by their number; g_mutex. The recipe is empty
// until Python has given it.
auto& g_combined = *new std::map<size_t, std::unique_ptr<Signature>>();

const Signature* combined(size_t count) {
  auto& s = g_combined[count];
  if (!s) {
    s = std::make_unique<Signature>();
    s->kind = Signature::Kind::Combine;
    Hasher h;
    h.add(81);
    h.add(count);
    s->hash = h.digest();
    s->fresh.emplace_back(word_layout());
  }
  return s.get();
}

using Numbers = std::array<int64_t, 2>;

// What words say, in their order; waits for them. Holds the GIL.
std::vector<Numbers> read(const std::vector<Word>& words) {
  std::vector<Numbers> all;
  py::list others;
  for (const auto& w : words) {
    auto& numbers = all.emplace_back();
    PyObject* array = w.value->array;
    if (PyObject_CheckBuffer(array)) {  // on the CPU
      auto memory = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(array));
      if (memory && PyMemoryView_GET_BUFFER(memory.ptr())->len == sizeof(Numbers)) {
        std::memcpy(numbers.data(), PyMemoryView_GET_BUFFER(memory.ptr())->buf, sizeof(Numbers));
        continue;
      }
      PyErr_Clear();
    }
    others.append(py::handle(array));
    numbers[0] = -1;
  }
  if (others.empty()) return all;
  const auto read = callback("read_words")(others).cast<std::vector<Numbers>>();
  auto next = read.begin();
  for (auto& numbers : all)
    if (numbers[0] < 0) numbers = *next++;
  return all;
}

// Takes the words out that `wanted` names. Those of programs that failed say nothing, and go.
template <typename F>
std::vector<Word> take(int16_t device, F wanted) {
  std::vector<Word> taken;
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  auto& words = g_words.at(device);
  std::deque<Word> kept;
  for (auto& w : words) {
    if (w.value->state == State::Failed) continue;
    if (w.value->state == State::Ready && wanted(w)) taken.push_back(std::move(w));
    else kept.push_back(std::move(w));
  }
  g_pending -= words.size() - kept.size();
  words.swap(kept);
  return taken;
}

[[noreturn]] void raise(const Word& word, const Numbers& numbers) {
  const auto& node = word.nodes.at(numbers[0] >> kNodeShift);
  py::list packs;
  for (auto p : node.signature->packs) packs.append(static_cast<int>(p));
  py::object error = callback("check_failed")(
      node.signature->plan, packs, numbers[0] & ((1 << kNodeShift) - 1), numbers[1],
      describe(node.line));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw PythonError::current();
}

}  // namespace

void set_checks(int level) { g_level = level; }
int checks() { return mode().inspect ? 0 : g_level.load(std::memory_order_relaxed); }

const Layout& word_layout() {
  static const Layout layout{at::kLong, Dims{2}, Dims{1}};
  return layout;
}

void close_checks(Trace& trace) {
  TPU_ASSERT_LOCKED();
  auto& s = trace.current;
  if (s.words.empty()) return;
  Word word;
  for (const auto& [node, slot] : s.words)
    word.nodes.push_back({s.nodes[node].signature, s.nodes[node].line});
  if (s.words.size() == 1) {
    word.value = s.slots[s.words[0].second];
  } else {
    // The last word again, up to a power of two: few programs differ in how many words they combine.
    const auto count = std::bit_ceil(s.words.size());
    const auto* signature = combined(count);
    const auto refs = static_cast<uint32_t>(s.refs.size());
    s.hasher.add(signature->hash);
    for (size_t i = 0; i < count; ++i) {
      s.refs.push_back(s.words[std::min(i, s.words.size() - 1)].second);
      s.hasher.add(s.refs.back());  // each of them, as where the segment is recorded from its nodes
    }
    word.value = make_value(word_layout(), 0, s.device, State::Pending);
    s.refs.push_back(trace.output_slot(word.value));
    s.nodes.push_back(
        {signature, refs, static_cast<uint32_t>(count), 1, static_cast<uint32_t>(s.numbers.size()),
         Line{}});
  }
  s.words.clear();
  g_words.at(s.device).push_back(std::move(word));
  ++g_pending;
}

bool combines_words(const Node& node) { return node.signature->kind == Signature::Kind::Combine; }

void separate_words(const Segment& s, const Node& node) {
  TPU_ASSERT_LOCKED();
  const auto* refs = s.refs.data() + node.refs;
  const auto combined_slot = refs[node.operands];
  if (combined_slot == kNoSlot) return;
  auto& words = g_words.at(s.device);
  const auto of = std::find_if(
      words.begin(), words.end(), [&](const Word& w) { return w.value == s.slots[combined_slot]; });
  if (of == words.end()) return;
  std::vector<Word> apart;
  apart.reserve(of->nodes.size());
  for (size_t i = 0; i < of->nodes.size(); ++i)
    apart.push_back({s.slots[refs[i]], {of->nodes[i]}, of->is_bad});
  g_pending += apart.size() - 1;
  words.insert(words.erase(of), apart.begin(), apart.end());
}

py::object plan_of(const Node& node) {
  auto& s = *node.signature;
  if (combines_words(node) && !s.plan) s.plan = callback("combine_words")(node.operands);
  return s.plan ? s.plan : py::object(py::none());
}

uint64_t next_launch() { return ++g_launched; }
uint64_t launches() { return g_launched; }

std::vector<ValuePtr> words_of(const Segment& s) {
  std::vector<ValuePtr> words;
  if (!g_pending) return words;
  for (const auto& w : g_words.at(s.device))
    if (std::find(s.slots.begin(), s.slots.end(), w.value) != s.slots.end())
      words.push_back(w.value);
  return words;
}

void date_words(const std::vector<ValuePtr>& words, uint64_t launch) {
  for (const auto& w : words)
    if (w->launch > launch) w->launch = launch;
}

void raise_checks(int16_t device, uint64_t launch) {
  if (!g_pending) return;
  const auto words = take(device, [&](const Word& w) { return w.value->launch <= launch; });
  if (words.empty()) return;
  py::gil_scoped_acquire gil;
  const auto numbers = read(words);
  for (size_t i = 0; i < words.size(); ++i)
    if (numbers[i][0]) raise(words[i], numbers[i]);
}

void sweep_checks(int16_t device) {
  std::vector<Word> done;
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    if (g_words.at(device).size() < std::max(g_sweep_at.at(device), kSweepAt)) return;
  }
  done = take(device, [](const Word& w) { return !w.is_bad; });
  std::vector<Word> ready, kept;
  for (auto& w : done) {
    const bool is_done =
        Function(py::getattr(py::handle(w.value->array), "is_ready"))().cast<bool>();
    (is_done ? ready : kept).push_back(std::move(w));
  }
  const auto numbers = read(ready);
  for (size_t i = 0; i < ready.size(); ++i) {
    if (!numbers[i][0]) continue;
    ready[i].is_bad = true;
    kept.push_back(std::move(ready[i]));
  }
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  auto& words = g_words.at(device);
  g_pending += kept.size();
  for (auto& w : kept) words.push_back(std::move(w));
  std::stable_sort(words.begin(), words.end(), [](const Word& a, const Word& b) {
    return a.value->launch < b.value->launch;
  });
  g_sweep_at.at(device) = 2 * words.size();
}

}  // namespace tpu

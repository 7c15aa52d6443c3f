#include "values/memory_history.h"

#include "recorder/trace.h"
#include "values/memory.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tpu {

std::atomic<bool> g_records_memory{false};

namespace {

struct MemoryEntry {
  MemoryEvent event;
  int16_t device;
  StackId stack;
  uint64_t address;
  int64_t nbytes;
  int64_t free_bytes;  // OutOfMemory
  int64_t microseconds;
};

struct LiveMemory {
  uint64_t address;
  int64_t nbytes;
  StackId stack;
  int16_t device;
};

struct MemoryHistory {
  bool events = false;
  size_t most = 0;
  std::deque<MemoryEntry> entries;
  std::unordered_map<const Value*, LiveMemory> live;
  // PJRT does not say where an array lies. Each allocation gets addresses of its own, used once.
  uint64_t next = uint64_t{1} << 36;

  uint64_t take_address(int64_t nbytes) {
    constexpr uint64_t kUnit = 512;
    return std::exchange(next, next + (static_cast<uint64_t>(nbytes) + kUnit - 1) / kUnit * kUnit);
  }
  void add(
      MemoryEvent event, int16_t device, StackId stack, uint64_t address, int64_t nbytes,
      int64_t free_bytes = 0) {
    if (!events) return;
    const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::system_clock::now().time_since_epoch());
    entries.push_back({event, device, stack, address, nbytes, free_bytes, now.count()});
    if (entries.size() > most) entries.pop_front();
  }
};

auto& g_history = *new Guarded<MemoryHistory>;
std::atomic<bool> g_keeps_stacks{false}, g_keeps_stacks_of_frees{false};

// Lines with the bytes of their results that are dead once the segment has run.
std::vector<std::pair<Line, int64_t>> intermediates(
    const Segment& s, at::ArrayRef<uint32_t> live, size_t most) {
  std::vector<std::pair<Line, int64_t>> lines;
  for (const auto& n : s.nodes) {
    int64_t nbytes = 0;
    for (uint32_t k = n.operands; k < n.operands + n.outputs; ++k)
      if (const auto slot = s.refs[n.refs + k];
          slot != kNoSlot && !std::binary_search(live.begin(), live.end(), slot))
        nbytes += static_cast<int64_t>(s.slots[slot]->nbytes);
    if (!nbytes) continue;
    const auto same = std::find_if(lines.begin(), lines.end(), [&](const auto& l) {
      return l.first.code == n.line.code && l.first.offset == n.line.offset;
    });
    if (same != lines.end()) same->second += nbytes;
    else if (n.line.code) lines.emplace_back(n.line, nbytes);
  }
  std::stable_sort(
      lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  if (lines.size() > most) lines.resize(most);
  return lines;
}

constexpr size_t kMostLines = 16;

void start_history(bool events, bool stacks, bool stacks_of_frees, size_t most, bool clear) {
  // What is there already has no stack.
  Lock values_lock(g_mutex, std::defer_lock);
  acquire(values_lock);
  const auto values = live_values();
  const auto history = g_history.lock();
  auto& h = *history;
  if (clear || !events) h.entries.clear();
  if (!g_records_memory) h.live.clear();
  h.events = events;
  h.most = most;
  while (h.entries.size() > most) h.entries.pop_front();
  g_keeps_stacks = stacks;
  g_keeps_stacks_of_frees = stacks_of_frees;
  for (const auto& v : values) {
    if (!v->accounted || !v->nbytes || h.live.count(v.get())) continue;
    const auto nbytes = static_cast<int64_t>(v->nbytes);
    h.live.emplace(v.get(), LiveMemory{h.take_address(nbytes), nbytes, v->stack, v->device});
  }
  g_records_memory = true;
}

void stop_history() {
  const auto history = g_history.lock();
  g_records_memory = g_keeps_stacks = g_keeps_stacks_of_frees = false;
  history->events = false;
  history->entries.clear();
  history->live.clear();
}

// (events, what is allocated): (event, device, stack, address, bytes, free bytes, microseconds) in their
// order, and (device, stack, address, bytes) in that of addresses.
py::tuple history() {
  std::vector<MemoryEntry> entries;
  std::vector<LiveMemory> live;
  {
    const auto history = g_history.lock();
    entries.assign(history->entries.begin(), history->entries.end());
    for (const auto& [value, l] : history->live) live.push_back(l);
  }
  std::sort(
      live.begin(), live.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
  py::list events, allocated;
  for (const auto& e : entries)
    events.append(
        py::make_tuple(
            static_cast<int>(e.event), e.device, e.stack, e.address, e.nbytes, e.free_bytes,
            e.microseconds));
  for (const auto& l : live)
    allocated.append(py::make_tuple(l.device, l.stack, l.address, l.nbytes));
  return py::make_tuple(events, allocated);
}

void record_snapshot(int16_t device) {
  const StackId stack = g_keeps_stacks ? current_stack() : 0;
  const auto history = g_history.lock();
  if (g_records_memory) history->add(MemoryEvent::Snapshot, device, stack, 0, 0);
}

// (address of the storage, address of the value, bytes, whether they are allocated, dtype, sizes, stack) of
// each storage of the device: of what it holds until recorded ops have run, or of their result where it is new.
py::list live_storages(int16_t device) {
  struct Held {
    const void* address;
    ValuePtr value;  // keeps its address from being another's
    Layout layout;
    bool accounted;
  };
  std::vector<Held> found;
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    const auto former = former_values();
    for (auto& [cell, latest] : live_cells(device)) {
      const auto old = latest->accounted ? former.end() : former.find(cell);
      const auto& v = old == former.end() ? latest : old->second;
      found.push_back({cell->address, v, v->layout, v->accounted});
    }
  }
  py::list all;
  for (const auto& [address, v, l, accounted] : found)
    all.append(
        py::make_tuple(
            reinterpret_cast<uintptr_t>(address), reinterpret_cast<uintptr_t>(v.get()), v->nbytes,
            accounted, static_cast<int>(l.dtype),
            py::tuple(py::cast(std::vector<int64_t>(l.sizes.begin(), l.sizes.end()))), v->stack));
  return all;
}

}  // namespace

StackId stack_of_allocation() { return g_keeps_stacks ? current_stack() : 0; }

void record_allocation(const Value& v) {
  if (!v.nbytes) return;
  const auto nbytes = static_cast<int64_t>(v.nbytes);
  const auto history = g_history.lock();
  if (!g_records_memory) return;
  const LiveMemory l{history->take_address(nbytes), nbytes, v.stack, v.device};
  history->live[&v] = l;
  history->add(MemoryEvent::Allocation, v.device, v.stack, l.address, nbytes);
}

void record_free(const Value& v, bool donated) {
  if (!v.nbytes) return;
  const StackId stack = g_keeps_stacks_of_frees ? current_stack_if_free() : 0;
  const auto history = g_history.lock();
  const auto it = history->live.find(&v);
  if (it == history->live.end()) return;
  const LiveMemory l = it->second;
  history->live.erase(it);
  history->add(
      donated ? MemoryEvent::Donation : MemoryEvent::Free, l.device, stack, l.address, l.nbytes);
}

void record_out_of_memory(int16_t device, int64_t needed, int64_t free_bytes) {
  const StackId stack = g_keeps_stacks ? current_stack() : 0;
  const auto history = g_history.lock();
  if (g_records_memory)
    history->add(MemoryEvent::OutOfMemory, device, stack, 0, needed, free_bytes);
}

void complete_stacks(const Segment& s) {
  if (!g_keeps_stacks) return;
  for (const auto& n : s.nodes)
    for (uint32_t k = n.operands; k < n.operands + n.outputs; ++k) {
      const auto slot = s.refs[n.refs + k];
      if (slot == kNoSlot || s.slots[slot]->stack || !n.line.code) continue;
      s.slots[slot]->stack = named_stack("", {n.line});
    }
}

TemporariesRecord::TemporariesRecord(const Segment& s, at::ArrayRef<uint32_t> live, int64_t nbytes)
    : nbytes_(nbytes), device_(s.device) {
  if (!records_memory() || nbytes <= 0) return;
  StackId stack = 0;
  if (g_keeps_stacks) {
    std::vector<Line> lines;
    for (const auto& [line, bytes] : intermediates(s, live, kMostLines)) lines.push_back(line);
    stack = named_stack(
        "temporaries of a program of " + std::to_string(s.nodes.size()) + " ops", lines);
  }
  const auto history = g_history.lock();
  if (!g_records_memory) return;
  address_ = history->take_address(nbytes);
  history->add(MemoryEvent::Temporaries, device_, stack, address_, nbytes);
}

TemporariesRecord::~TemporariesRecord() {
  if (!address_) return;
  const auto history = g_history.lock();
  if (g_records_memory) history->add(MemoryEvent::TemporariesEnd, device_, 0, address_, nbytes_);
}

py::list largest_intermediates(const Segment& s, at::ArrayRef<uint32_t> live, size_t most) {
  py::list all;
  for (const auto& [line, nbytes] : intermediates(s, live, most))
    all.append(py::make_tuple(describe(line), nbytes));
  return all;
}

void register_memory_history(py::module_& m) {
  m.def("start_memory_history", &start_history);
  m.def("stop_memory_history", &stop_history);
  m.def("records_memory", &records_memory);
  m.def("keeps_memory_events", [] { return g_history.lock()->events; });
  m.def("memory_history", &history);
  m.def("live_storages", &live_storages);
  m.def("memory_stacks", &stacks_from);
  m.def("record_snapshot", &record_snapshot);
}

}  // namespace tpu

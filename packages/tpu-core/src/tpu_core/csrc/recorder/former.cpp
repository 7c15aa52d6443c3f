#include "recorder/former.h"

#include "recorder/trace.h"
#include "runtime/python.h"
#include "values/device.h"
#include "values/memory.h"

#include <utility>

namespace tpu {
namespace {

// Whether a segment's slots hold a value as an input.
bool is_input_of(const Segment& s, const Value& v) {
  return v.stamp == s.stamp && v.slot < s.slots.size() && s.slots[v.slot].get() == &v &&
      s.is_input[v.slot];
}

bool was_donated(const Value& v) {
  if (v.state != State::Ready || !v.array) return false;
  const py::handle array(v.array);
  return py::hasattr(array, "is_deleted") && array.attr("is_deleted")().cast<bool>();
}

thread_local const FormerInUse* t_running = nullptr;

}  // namespace

FormerInUse::FormerInUse(const FormerState& former)
    : former_(&former), outer_(std::exchange(t_running, this)) {}
FormerInUse::~FormerInUse() { t_running = outer_; }

void add_running_formers(std::vector<const FormerState*>& formers) {
  for (const auto* f = t_running; f; f = f->outer_) formers.push_back(f->former_);
}

FormerState& FormerState::operator=(FormerState&& other) noexcept {
  if (this == &other) return *this;
  clear();
  storages = std::exchange(other.storages, {});
  draws = std::exchange(other.draws, {});
  undo = std::exchange(other.undo, {});
  return *this;
}

void FormerState::clear() {
  storages.clear();
  draws.clear();
  for (auto* function : undo) release_reference(function);
  undo.clear();
}

void FormerState::hold() {
  for (auto& f : storages)
    if (f.old && !f.hold) f.hold = ValuePtr::reclaim_copy(f.old);
}

int64_t FormerState::held_bytes() const {
  int64_t bytes = 0;
  for (const auto& f : storages)
    if (f.hold && f.hold.use_count() == 1 && f.hold->accounted)
      bytes += static_cast<int64_t>(f.hold->nbytes);
  return bytes;
}

void FormerState::release() {
  for (auto& f : storages) {
    if (!f.hold || f.hold.use_count() > 1) continue;
    f.old = nullptr;
    f.hold.reset();
  }
}

void remember_former(Segment& s, const Trace& trace, Cell* cell, const Value* latest) {
  TPU_ASSERT_LOCKED();
  if (!cell->address) return;  // of no bytes
  auto& storages = s.former.storages;
  const auto& v = cell->value;
  const bool of_segment = v->state == State::Pending && v->trace == &trace;
  const bool known =
      cell->former_stamp == s.stamp && storages[cell->former].generation == cell->generation;
  if (known) {
    storages[cell->former].latest = latest;
    if (of_segment) return;
  }
  // Memory that nothing was written to holds nothing; where the segment made it, too, its reads raise.
  if (of_segment || v->state == State::Uninitialized) return;
  FormerState::Storage f{cell, cell->generation, latest, v.get(), {}};
  if (!is_input_of(s, *v)) f.hold = v;
  if (known) {
    storages[cell->former] = std::move(f);
    return;
  }
  cell->former_stamp = s.stamp;
  cell->former = static_cast<uint32_t>(storages.size());
  storages.push_back(std::move(f));
}

void remember_draw(Segment& s, const at::Generator& generator) {
  const uint64_t next = generator.get_offset(), seed = generator.current_seed();
  for (auto& d : s.former.draws) {
    if (d.generator != generator) continue;
    if (d.seed != seed || next < d.next) d.first = next - kDraw;  // it was seeded since
    d.seed = seed;
    d.next = next;
    return;
  }
  s.former.draws.push_back({generator, seed, next - kDraw, next});
}

void renew_former(Segment& s) {
  auto& storages = s.former.storages;
  for (uint32_t i = 0; i < storages.size(); ++i) {
    auto& f = storages[i];
    if (!is_of(f.cell, f.generation)) continue;
    f.cell->former_stamp = s.stamp;
    f.cell->former = i;
  }
}

void roll_back(FormerState& former) {
  for (auto& f : former.storages)
    if (f.old && was_donated(*f.old)) f.old = nullptr;
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    for (auto& f : former.storages) {
      if (!f.old) continue;
      ValuePtr value = f.hold ? f.hold : ValuePtr::reclaim_copy(f.old);
      put_value(f.cell, f.generation, f.latest, value);
    }
    for (auto& d : former.draws)
      if (d.generator.current_seed() == d.seed && d.generator.get_offset() == d.next)
        d.generator.set_offset(d.first);
  }
  for (auto* function : former.undo) Function(py::handle(function))();
}

}  // namespace tpu

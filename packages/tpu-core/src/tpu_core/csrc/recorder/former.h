// What storages and generators held before a segment, for one that finds too little memory: as an op that
// cannot have memory leaves PyTorch's state alone, so does a segment.
#pragma once

#include "values/value.h"

#include <ATen/core/Generator.h>

#include <vector>

namespace tpu {

struct Segment;
struct Trace;

struct FormerState {
  // A storage that was there before the segment, which writes it.
  struct Storage {
    Cell* cell;
    uint32_t generation;
    const Value* latest;  // what the segment wrote last
    Value* old;
    ValuePtr hold;  // of `old`, where it is no input of the segment
  };
  // A generator that the segment's ops drew from.
  struct Draws {
    at::Generator generator;
    uint64_t seed, first, next;  // offsets
  };
  std::vector<Storage> storages;
  std::vector<Draws> draws;
  std::vector<PyObject*> undo;  // Python functions, owned: state of the host that goes with it

  FormerState() = default;
  FormerState(FormerState&&) noexcept = default;
  FormerState& operator=(FormerState&&) noexcept;
  ~FormerState() { clear(); }
  void clear();
  // Holds all old values, so that nothing takes their memory.
  void hold();
  // Lets go of what only this holds: the bytes that it was.
  int64_t held_bytes() const;
  void release();
};

// A segment's former state while it runs, for `former_values`.
class FormerInUse {
 public:
  explicit FormerInUse(const FormerState& former);
  ~FormerInUse();
  FormerInUse(const FormerInUse&) = delete;

 private:
  const FormerState* former_;
  const FormerInUse* outer_;
  friend void add_running_formers(std::vector<const FormerState*>& formers);
};
// Those of the segments that this thread runs.
void add_running_formers(std::vector<const FormerState*>& formers);

// The segment is about to write `latest` to a cell. Needs g_mutex.
void remember_former(Segment& s, const Trace& trace, Cell* cell, const Value* latest);
// The segment drew from a generator.
void remember_draw(Segment& s, const at::Generator& generator);
// The segment has got another stamp.
void renew_former(Segment& s);
// Gives storages and generators what they had before the segment, but for what is written to since, or was
// donated to a program that failed. Holds the GIL; g_mutex is not held.
void roll_back(FormerState& former);

}  // namespace tpu

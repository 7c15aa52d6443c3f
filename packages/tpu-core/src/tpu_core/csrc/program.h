// Programs: what decides which one serves a segment, and what runs it.
#pragma once

#include "python.h"
#include "trace.h"

namespace tpu {

struct Program;

// What a cut decides while g_mutex is held: which values live on, which inputs may be reused, which
// program serves.
struct Cut {
  c10::SmallVector<uint32_t, 8> live, donated, inputs;  // slots
  std::vector<uint8_t> mask;  // numbers to compile in, where no program serves
  Hash128 form;  // the segment, whatever device it is on
  Hash128 key;
  Program* program = nullptr;
  std::shared_ptr<const Failure> failed;  // of an input
};
Cut decide(Segment& s);

// Runs a segment that was taken off its trace. Holds the GIL; g_mutex is not held. Throws what went
// wrong, and what depends on it carries the error from then on; an interruption leaves every value as it
// is.
void run(Segment& s, Cut& c);
// Makes every value that the segment was to make carry the error.
void give_up(Segment& s, const PythonError& error);

// The newest result on a device (borrowed), or null: the device runs in order, so waiting for it waits
// for everything.
PyObject* newest_array(int16_t device);
void clear_programs();
// Makes a value's array hold just what counts: padding is for programs that know of it. Holds the GIL.
void drop_padding(Value& v);
// (runs, seconds that the host spent in starting them) of each program, by its key in the cache.
py::dict program_runs();

}  // namespace tpu

// Programs: what decides which one serves a segment, and what runs it.
#pragma once

#include "recorder/trace.h"
#include "runtime/python.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tpu {

using Slots = c10::SmallVector<uint32_t, 8>;  // ascending

struct Program {
  py::object execute;  // LoadedExecutable.execute_sharded, bound
  // Result handlers for consume_with_handlers. None: execute gives a list, or None where another program
  // is to be compiled in its place.
  py::object handlers;
  py::object info;               // Python's record of the program
  std::vector<uint32_t> inputs;  // slots, in the order of the executable's parameters
  Slots outputs;                 // slots, in the order of its results
  Slots donated;                 // slots whose memory it takes
  std::vector<uint8_t> compiled_in;
  std::vector<uint64_t> constants;  // the numbers it was compiled with
  int64_t temporaries = 0;          // bytes that only the run takes
  int64_t memory = 0;  // bytes of temporaries, less the outputs that take an input's memory
  uint64_t runs = 0;
  double seconds = 0;  // the host's, in starting it; written under the GIL, as is `runs`
};

// What a cut decides while g_mutex is held: which values live on, which inputs may be reused, which
// program serves.
struct Cut {
  Slots live, donated, inputs;
  int16_t device = 0;
  Hash128 key;      // of the ops, of what is live and of what is donated
  Hash128 content;  // of the ops alone
  bool is_piece = false;
  bool on_host = false;  // to be run by CPU kernels: each of its sizes would be a program
  Program* program = nullptr;
  std::shared_ptr<Program>
      own;  // CPU kernels as a program, which is not kept: sizes seldom come again
  // Where no program serves, what to compile.
  Slots outputs, reused;
  std::vector<uint8_t> mask;              // numbers to compile in
  std::shared_ptr<const Failure> failed;  // of an input
};
Cut decide(Segment& s);
// Whether inputs that nothing else holds lend their memory to outputs; they are gone after the run then.
void set_donates(bool donates);
// The same for a segment of one op that is a piece of another: whatever program runs it, else one that
// serves whatever is alive.
Cut decide_piece(Segment& s);
// The key of the program that a piece lacks, or nothing where it has one.
std::optional<Hash128> missing_program(const Segment& s);

// Remembers a program that was made for what a cut asked for.
Program* keep_program(const Cut& c, std::unique_ptr<Program> program);
// Takes the cut's program out of use, and sets what to compile in its place.
void retire_program(Cut& c);
void clear_programs();
std::string hex(const Hash128& key);
int64_t bytes_of(const Segment& s, at::ArrayRef<uint32_t> slots);

// Runs a segment that was taken off its trace. Holds the GIL; g_mutex is not held. Throws what went
// wrong, and what depends on it carries the error from then on; an interruption leaves every value as it
// is.
void run(Segment& s, Cut& c);
// Whether an error says nothing about the work that it stopped (Ctrl-C, what a signal handler raised, a compile
// that is forbidden), which then stays to be done. Needs the GIL.
bool is_interruption(const PythonError& error);
// Whether an error says that memory is short: then none of the segment is to have happened. Needs the GIL.
bool is_out_of_memory(const PythonError& error);
// Makes every value that the segment was to make carry the error.
void give_up(Segment& s, const PythonError& error);
// The segment as Python sees it (`tpu_core.compiler.segment.Segment.from_export`). Needs the GIL.
py::dict export_segment(
    const Segment& s, const Cut& c, at::ArrayRef<uint32_t> live, at::ArrayRef<uint32_t> donated,
    const std::vector<uint8_t>& compiled_in);

// The newest result on a device (borrowed), or null: the device runs in order, so waiting for it waits
// for everything.
PyObject* newest_array(int16_t device);
void set_newest(int16_t device, PyObject* array);
// A settled value's array, which is made of memory on the host where that is what it holds. A reference of
// its own: the value may let go of the array whenever g_mutex and the GIL are free. Holds the GIL.
py::object device_array(Value& v);
// A value's array that holds just what counts, which the value keeps in place of `array`: padding is for
// programs that know of it. Holds the GIL.
py::object without_padding(Value& v, const py::object& array);
// (runs, seconds that the host spent in starting them) of each program, by its key in the cache.
py::dict program_runs();

}  // namespace tpu

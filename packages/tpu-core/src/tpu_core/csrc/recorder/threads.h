// The traces of each user thread, and the mode that cuts them.
#pragma once

#include "recorder/trace.h"

#include <optional>

namespace tpu {

// How the current thread cuts its traces; see `tpu_core.modes`.
struct Mode {
  int64_t max_ops = 1;            // cut when a segment has so many ops; 0: no bound
  bool wait = false;              // wait for each segment
  PyObject* inspect = nullptr;    // Python function that sees each finished segment; never released
  bool repetitions = false;       // cut loops where they repeat, before they reach max_ops
  PyObject* providers = nullptr;  // tuple of Python's ProviderFactory, or null; never released
  bool operator==(const Mode&) const = default;
};
const Mode& mode();
void set_default_mode(const Mode& m);
void set_thread_mode(const std::optional<Mode>& m);
std::optional<Mode> thread_mode();

// The trace that ops of this thread join: autograd's threads record into the trace of the thread that
// called backward.
Trace* current_trace(int16_t device);

// Runs what this thread has recorded, on every device.
void flush_current(const char* cut);

// Has a Python function called if what this thread has recorded finds too little memory.
void add_undo(int16_t device, PyObject* function);

// Returns when autograd's threads have let go of every backward that has returned. What they hold of one
// may need the GIL to be dropped (the context that torch passes to them), and a thread that asks for it
// while the interpreter ends is ended by it, which aborts the process. They drop the last before they
// take up the next, so one more of nothing is waited for.
void wait_for_autograd();

}  // namespace tpu

// Threads that Python ends because they ask for the GIL while the interpreter ends.
#pragma once

namespace tpu {

// Has threads parked that Python ends. It unwinds their stacks, and a destructor that takes the GIL back, as
// PyTorch's do after each op, turns that into std::terminate: a daemon thread that trains would abort the
// process at its end. Python 3.14 parks such threads itself.
void park_ended_threads();

}  // namespace tpu

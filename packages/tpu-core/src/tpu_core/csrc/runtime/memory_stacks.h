// Stacks of allocations, each kept once.
#pragma once

#include "runtime/python.h"
#include "runtime/source_location.h"

#include <cstdint>
#include <string>
#include <vector>

namespace tpu {

using StackId = uint32_t;  // 0: none

// The calling thread's stack. Takes g_mutex; the GIL may be held or not.
StackId current_stack();
// The same where g_mutex must not be waited for: none if another thread has it.
StackId current_stack_if_free();
// A stack that is made up: what the memory is for, and the lines that it belongs to, the first above all.
StackId named_stack(const std::string& name, const std::vector<Line>& lines);
// (frames, index of the user's frame or None, whether that is the line of a forward op whose gradient is
// computed) of each stack in the order of the ids; a frame is (file, line, function). Needs the GIL.
py::list stacks_from(StackId first);

}  // namespace tpu

// The user's Python line for each recorded op, cheaply: a code object and an offset.
#pragma once

#include <Python.h>

#include <string>
#include <vector>

namespace tpu {

struct Line {
  PyCodeObject* code = nullptr;  // kept alive for the life of the process
  int offset = 0;
};

// The innermost frame of the calling thread that is not inside torch or this project; on autograd's
// threads, the line of the forward op whose gradient is being computed. Needs g_mutex, and no GIL.
Line user_line();

inline constexpr size_t kNoFrame = ~size_t{0};

// The calling thread's Python frames, innermost first. In a backward the line of the forward op comes
// before the engine's call.
struct FrameStack {
  std::vector<Line> frames;
  size_t users = kNoFrame;  // index of the innermost frame of the user's own code
  bool gradient = false;    // that frame is the forward op's, whose gradient is computed
};
FrameStack python_stack();  // needs g_mutex, and no GIL

std::string describe(const Line& line);  // "train.py:31 in step"; needs the GIL
void set_internal_prefixes(PyObject* tuple_of_str);

}  // namespace tpu

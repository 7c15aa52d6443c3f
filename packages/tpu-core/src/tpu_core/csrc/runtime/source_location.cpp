#include "runtime/source_location.h"

#include "runtime/locks.h"

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#define TPU_FAST_FRAMES 1
#endif

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <c10/util/flat_hash_map.h>

#include <array>
#include <cstring>
#include <vector>

namespace tpu {
namespace {

auto& g_prefixes = *new std::vector<std::string>;
// Whose code a frame runs: the user's, torch's or ours, or the call of autograd's engine, under which
// frames belong to the caller of backward and not to the op.
enum class Owner : uint8_t { User, Internal, Engine };
auto& g_owners =
    *new ska::flat_hash_map<PyCodeObject*, Owner>;  // g_mutex; owns a reference to each key

// Lines of forward ops by autograd sequence number, which each thread counts for itself, so that
// backward ops carry them. A ring: a graph of more nodes than this loses its oldest lines.
constexpr size_t kRing = 1 << 16;
struct Remembered {
  uint64_t sequence = ~0ull;
  uint64_t thread = 0;
  Line line;
};
std::array<Remembered, kRing> g_forward;  // g_mutex

Remembered& remembered(uint64_t sequence, uint64_t thread) {
  return g_forward[(sequence + thread * 4099) % kRing];
}

Owner owner_of(PyCodeObject* code) {
  if (auto it = g_owners.find(code); it != g_owners.end()) return it->second;
  // First sight of this code object: hold it for good, so that its address is never reused.
  PyGILState_STATE gil = PyGILState_Ensure();
  Py_ssize_t size = 0;
  const char* name = PyUnicode_AsUTF8AndSize(code->co_filename, &size);
  Owner owner = Owner::User;
  if (name) {
    std::string file(name, size);
    // Code that torch.fx generates is not the user's either.
    bool internal = file.rfind("<frozen", 0) == 0 || file.rfind("<eval_with_key>", 0) == 0;
    for (const auto& prefix : g_prefixes) internal = internal || file.rfind(prefix, 0) == 0;
    const char* function = PyUnicode_AsUTF8(code->co_name);
    if (internal)
      owner = function && !std::strcmp(function, "_engine_run_backward") ? Owner::Engine
                                                                         : Owner::Internal;
  }
  PyErr_Clear();
  Py_INCREF(code);
  PyGILState_Release(gil);
  g_owners.emplace(code, owner);
  return owner;
}

struct Found {
  Line line;
  bool users = false;  // the user's own code; else the outermost frame of torch or of this project
};

// Calls `f` with the code, offset and owner of each frame of the calling thread, innermost first, until it
// returns false.
template <typename F>
void each_frame(F f) {
#ifdef TPU_FAST_FRAMES
  // The thread's own frames do not move while it is here, so walking them needs no GIL.
  PyThreadState* state = PyGILState_GetThisThreadState();
  if (!state || !state->cframe) return;
  for (auto* frame = state->cframe->current_frame; frame; frame = frame->previous) {
    if (_PyFrame_IsIncomplete(frame) || !PyCode_Check(frame->f_code)) continue;
    const int offset = static_cast<int>(_PyInterpreterFrame_LASTI(frame) * sizeof(_Py_CODEUNIT));
    if (!f(Line{frame->f_code, offset}, owner_of(frame->f_code))) break;
  }
#else
  if (!PyGILState_GetThisThreadState()) return;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Owner owner = owner_of(code);  // keeps its own reference
    Py_DECREF(code);
    const bool more = f(Line{code, PyFrame_GetLasti(frame)}, owner);
    PyFrameObject* back = more ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(gil);
#endif
}

// The innermost line of the user's own code. In a backward the search ends at the engine: the line
// that called backward is not that of the op.
Found python_line() {
  Found found;
  each_frame([&](const Line& line, Owner owner) {
    if (owner == Owner::Engine) return false;
    found.line = line;
    found.users = owner == Owner::User;
    return !found.users;
  });
  return found;
}

// The line of the forward op whose gradient is being computed. A view records nothing, so the op that
// was recorded next stands for it.
Line forward_line(const torch::autograd::Node& node) {
  for (uint64_t s = node.sequence_nr(); s < node.sequence_nr() + 4; ++s) {
    const auto& r = remembered(s, node.thread_id());
    if (r.sequence == s && r.thread == node.thread_id()) return r.line;
  }
  return {};
}

}  // namespace

Line user_line() {
  TPU_ASSERT_LOCKED();
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  const Found found = python_line();
  if (backward && !found.users) {
    const auto node = torch::autograd::get_current_node();
    const Line line = node ? forward_line(*node) : Line{};
    return line.code ? line : found.line;
  }
  // VariableType makes the op's grad_fn before it calls the backend's kernel. What follows without a
  // grad_fn of its own must not take that line over.
  if (const uint64_t next = at::sequence_number::peek()) {
    const uint64_t thread = at::RecordFunction::currentThreadId();
    auto& r = remembered(next - 1, thread);
    if (r.sequence != next - 1 || r.thread != thread) r = {next - 1, thread, found.line};
  }
  return found.line;
}

FrameStack python_stack() {
  TPU_ASSERT_LOCKED();
  FrameStack stack;
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  auto add_forward = [&] {
    const auto node = torch::autograd::get_current_node();
    const Line line = node ? forward_line(*node) : Line{};
    if (!line.code) return;
    stack.users = stack.frames.size();
    stack.gradient = true;
    stack.frames.push_back(line);
  };
  each_frame([&](const Line& line, Owner owner) {
    if (stack.users == kNoFrame && backward && owner == Owner::Engine) add_forward();
    if (stack.users == kNoFrame && owner == Owner::User) stack.users = stack.frames.size();
    stack.frames.push_back(line);
    return true;
  });
  if (stack.users == kNoFrame && backward) add_forward();  // a thread of autograd's has no frames
  return stack;
}

std::string describe(const Line& line) {
  if (!line.code) return "";
  const char* file = PyUnicode_AsUTF8(line.code->co_filename);
  const char* name = PyUnicode_AsUTF8(line.code->co_name);
  PyErr_Clear();
  return std::string(file ? file : "?") + ":" +
      std::to_string(PyCode_Addr2Line(line.code, line.offset)) + " in " + (name ? name : "?");
}

void set_internal_prefixes(PyObject* prefixes) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(prefixes); ++i)
    g_prefixes.emplace_back(PyUnicode_AsUTF8(PyTuple_GET_ITEM(prefixes, i)));
}

}  // namespace tpu

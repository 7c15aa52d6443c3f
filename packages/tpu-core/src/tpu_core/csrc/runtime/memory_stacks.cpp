#include "runtime/memory_stacks.h"

#include "runtime/hash.h"
#include "runtime/locks.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

struct NamedStack {
  std::string name;  // empty: of a thread
  FrameStack stack;
};

std::mutex g_stacks_mutex;
// Never destroyed, nor emptied: values hold ids. A program has as many stacks as it has places that allocate.
auto& g_stacks = *new std::vector<NamedStack>();
auto& g_stack_ids = *new std::unordered_map<Hash128, StackId, HashOfHash>();

StackId keep_stack(NamedStack&& s) {
  Hasher h;
  h.add_bytes(s.name);
  h.add(s.stack.gradient);
  for (const auto& f : s.stack.frames) {
    h.add(reinterpret_cast<uintptr_t>(f.code));  // a code object that was seen lives on
    h.add(static_cast<uint64_t>(f.offset));
  }
  std::lock_guard<std::mutex> lock(g_stacks_mutex);
  const auto [it, is_new] =
      g_stack_ids.try_emplace(h.digest(), static_cast<StackId>(g_stacks.size() + 1));
  if (is_new) g_stacks.push_back(std::move(s));
  return it->second;
}

StackId keep_current() {
  auto stack = python_stack();
  return stack.frames.empty() ? 0 : keep_stack({"", std::move(stack)});
}

}  // namespace

StackId current_stack() {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  return keep_current();
}

StackId current_stack_if_free() {
  Lock lock(g_mutex, std::try_to_lock);
  return lock ? keep_current() : 0;
}

StackId named_stack(const std::string& name, const std::vector<Line>& lines) {
  return keep_stack({name, {lines, lines.empty() ? kNoFrame : 0, false}});
}

py::list stacks_from(StackId first) {
  std::vector<NamedStack> stacks;
  {
    std::lock_guard<std::mutex> lock(g_stacks_mutex);
    const size_t known = std::min<size_t>(first, g_stacks.size());
    stacks.assign(g_stacks.begin() + static_cast<std::ptrdiff_t>(known), g_stacks.end());
  }
  py::list all;
  for (const auto& [name, stack] : stacks) {
    py::list frames;
    for (const auto& f : stack.frames)
      frames.append(
          py::make_tuple(
              py::handle(f.code->co_filename), PyCode_Addr2Line(f.code, f.offset),
              py::handle(f.code->co_name)));
    py::object users = py::none();
    if (stack.users != kNoFrame) users = py::int_(stack.users);
    all.append(py::make_tuple(name, frames, users, stack.gradient));
  }
  return all;
}

void lock_stacks_for_fork() { g_stacks_mutex.lock(); }
void unlock_stacks_after_fork() { g_stacks_mutex.unlock(); }

}  // namespace tpu

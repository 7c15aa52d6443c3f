#include "runtime/memory_stacks.h"

#include "runtime/hash.h"
#include "runtime/locks.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

struct NamedStack {
  std::string name;  // empty: of a thread
  FrameStack stack;
};

// Never emptied: values hold ids. A program has as many stacks as it has places that allocate.
struct Stacks {
  std::vector<NamedStack> all;
  std::unordered_map<Hash128, StackId, HashOfHash> ids;
};
auto& g_stacks = *new Guarded<Stacks>;

StackId keep_stack(NamedStack&& s) {
  Hasher h;
  h.add_bytes(s.name);
  h.add(s.stack.gradient);
  for (const auto& f : s.stack.frames) {
    h.add(reinterpret_cast<uintptr_t>(f.code));  // a code object that was seen lives on
    h.add(static_cast<uint64_t>(f.offset));
  }
  const auto stacks = g_stacks.lock();
  const auto [it, is_new] =
      stacks->ids.try_emplace(h.digest(), static_cast<StackId>(stacks->all.size() + 1));
  if (is_new) stacks->all.push_back(std::move(s));
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
    const auto known = g_stacks.lock();
    const auto begin = static_cast<std::ptrdiff_t>(std::min<size_t>(first, known->all.size()));
    stacks.assign(known->all.begin() + begin, known->all.end());
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

}  // namespace tpu

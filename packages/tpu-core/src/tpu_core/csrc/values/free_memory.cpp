#include "values/free_memory.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>

namespace tpu {
namespace {

std::atomic<size_t> g_limit{0};
std::atomic<size_t> g_made{0};   // bytes of large values since the last look
std::atomic<int64_t> g_rest{0};  // resident memory outside of the heap, when the limit was set
constexpr size_t kLarge = size_t{1} << 22;
// Looks between two limits' worth of values.
constexpr size_t kLooks = 8;

// Of malloc.h from glibc 2.33 on; binaries for many systems are built with an older one.
struct MallocInfo {
  size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};

template <typename Function>
Function* symbol(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

MallocInfo heap() {
  static auto* const info = symbol<MallocInfo()>("mallinfo2");
  return info ? info() : MallocInfo{};
}

int64_t resident() {
  int64_t all = 0, pages = 0;
  std::ifstream("/proc/self/statm") >> all >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace

void limit_free_memory(size_t bytes) {
  const auto h = heap();
  g_rest = resident() - static_cast<int64_t>(h.uordblks + h.fordblks);
  g_made = 0;
  g_limit = bytes;
}

void note_made(size_t nbytes) {
  const size_t limit = g_limit.load(std::memory_order_relaxed);
  if (nbytes < kLarge || !limit) return;
  if (g_made.fetch_add(nbytes) + nbytes < limit / kLooks) return;
  g_made = 0;
  // Where the heap does not say what is used, all that came since the limit was set may be free.
  const auto used = static_cast<int64_t>(heap().uordblks) + g_rest;
  if (resident() - used < static_cast<int64_t>(limit)) return;
  static auto* const trim = symbol<int(size_t)>("malloc_trim");
  if (trim) trim(0);
}

}  // namespace tpu

#include "runtime/locks.h"

#include <new>

#ifdef TPU_CHECK_LOCKS
#include <cstdio>
#include <cstdlib>
#endif

namespace tpu {
namespace {

// Those that were made, the latest first; all are made while the extension is loaded.
LeafMutex* g_leaves = nullptr;

}  // namespace

StateMutex g_mutex;

void acquire(Lock& lock) {
  if (lock.try_lock()) return;
  WithoutGil no_gil;
  lock.lock();
}

LeafMutex::LeafMutex() : next_(std::exchange(g_leaves, this)) {}

void LeafMutex::lock_all() {
  for (auto* m = g_leaves; m; m = m->next_) m->lock();
}

void LeafMutex::unlock_all() {
  for (auto* m = g_leaves; m; m = m->next_) m->unlock();
}

#ifdef TPU_CHECK_LOCKS

void StateMutex::check_wait() const {
  if (is_held() || !Py_IsInitialized() || !PyGILState_Check()) return;
  std::fputs("tpu: a thread that holds the GIL waits for g_mutex\n", stderr);
  std::abort();
}

void check_locked(const char* function) {
  if (g_mutex.is_held()) return;
  std::fprintf(stderr, "tpu: %s was called without g_mutex\n", function);
  std::abort();
}

#endif

}  // namespace tpu

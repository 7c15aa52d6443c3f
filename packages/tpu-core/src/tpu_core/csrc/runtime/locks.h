// The locks of the extension, in the order in which a thread takes them:
//
//   1. g_mutex: traces, programs, and the fields of values that change;
//   2. the GIL, of which a thread lets go before it waits for g_mutex;
//   3. a leaf for each `Guarded`: under one nothing else is locked and no Python runs.
//
// So a thread may ask for the GIL while it holds g_mutex, never the other way round, and no Python code
// runs under g_mutex, as it may let another thread in that wants both. A build with TPU_CHECK_LOCKS
// (`nox -s sanitize`) aborts where this does not hold.
#pragma once

#include <tpu_core/python.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#ifdef TPU_CHECK_LOCKS
#include <thread>
#endif

// Clang's analysis of locks (-Wthread-safety); nothing for other compilers.
#ifdef __clang__
#define TPU_CAPABILITY(name) __attribute__((capability(name)))
#define TPU_ACQUIRE(...) __attribute__((acquire_capability(__VA_ARGS__)))
#define TPU_TRY_ACQUIRE(...) __attribute__((try_acquire_capability(__VA_ARGS__)))
#define TPU_RELEASE(...) __attribute__((release_capability(__VA_ARGS__)))
#else
#define TPU_CAPABILITY(name)
#define TPU_ACQUIRE(...)
#define TPU_TRY_ACQUIRE(...)
#define TPU_RELEASE(...)
#endif

namespace tpu {

// A recursive mutex that is waited for without the GIL.
class TPU_CAPABILITY("mutex") StateMutex {
 public:
  void lock() TPU_ACQUIRE() {
    check_wait();
    mutex_.lock();
    entered();
  }
  bool try_lock() TPU_TRY_ACQUIRE(true) {
    if (!mutex_.try_lock()) return false;
    entered();
    return true;
  }
  void unlock() TPU_RELEASE() {
    left();
    mutex_.unlock();
  }

#ifdef TPU_CHECK_LOCKS
  bool is_held() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

 private:
  void check_wait() const;
  void entered() {
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    ++depth_;
  }
  void left() {
    if (--depth_ == 0) owner_.store({}, std::memory_order_relaxed);
  }

  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
#else

 private:
  void check_wait() const {}
  void entered() {}
  void left() {}
#endif
  std::recursive_mutex mutex_;
};

extern StateMutex g_mutex;
using Lock = std::unique_lock<StateMutex>;

// Takes g_mutex where the GIL may be held, without ever waiting for the one with the other.
void acquire(Lock& lock);

// The caller holds g_mutex.
#ifdef TPU_CHECK_LOCKS
void check_locked(const char* function);
#define TPU_ASSERT_LOCKED() ::tpu::check_locked(__func__)
#else
#define TPU_ASSERT_LOCKED() static_cast<void>(0)
#endif

// Whether signals are handled on this thread, Python's first: it looks for them while it waits (Ctrl-C).
bool handles_signals();

// A mutex that a fork waits for: the child, which has the forking thread alone, could never take one that
// another thread held.
class LeafMutex {
 public:
  LeafMutex();
  LeafMutex(const LeafMutex&) = delete;
  LeafMutex& operator=(const LeafMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // Before a fork, and after it on both sides.
  static void lock_all();
  static void unlock_all();

 private:
  std::mutex mutex_;
  LeafMutex* next_;
};

// State that is reached with its own leaf mutex alone:
//
//     Guarded<std::vector<int>> numbers;
//     numbers.lock()->push_back(1);
//
// Globals of this type are never destroyed (`auto& g_numbers = *new Guarded<...>`): other threads, and
// the destructors of statics, may still use them when the interpreter has ended.
template <typename T>
class Guarded {
 public:
  class Access {
   public:
    T* operator->() const { return value_; }
    T& operator*() const { return *value_; }

   private:
    friend class Guarded;
    Access(LeafMutex& mutex, T& value) : lock_(mutex), value_(&value) {}
    std::unique_lock<LeafMutex> lock_;
    T* value_;
  };

  Access lock() { return {mutex_, value_}; }

 private:
  LeafMutex mutex_;
  T value_{};
};

// A number that changes under one lock and is read without it.
class Counter {
 public:
  operator uint64_t() const { return n_.load(std::memory_order_relaxed); }
  // One writer at a time: a plain addition, which a read sees before it or after it.
  Counter& operator++() { return set(*this + 1); }
  Counter& operator--() { return set(*this - 1); }

 private:
  Counter& set(uint64_t n) {
    n_.store(n, std::memory_order_relaxed);
    return *this;
  }
  std::atomic<uint64_t> n_{0};
};

}  // namespace tpu

#include "runtime/ended_threads.h"

#include "runtime/locks.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace tpu {
namespace {

std::terminate_handler g_former = nullptr;

void on_terminate() {
  // The exception is not asked for: a thread that is ended within a catch block has that one.
  if (interpreter_ends() && !handles_signals()) park();
  if (g_former) g_former();
  std::abort();
}

}  // namespace

bool interpreter_ends() {
  if (!Py_IsInitialized()) return true;
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

void park() {
  while (true) pause();
}

void park_ended_threads() { g_former = std::set_terminate(&on_terminate); }

}  // namespace tpu

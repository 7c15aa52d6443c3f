#include "runtime/ended_threads.h"

#include "runtime/locks.h"

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

void park_ended_threads() { g_former = std::set_terminate(&on_terminate); }

}  // namespace tpu

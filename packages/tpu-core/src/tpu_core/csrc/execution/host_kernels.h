// The host tier: on the CPU platform, where a value's memory is the host's, an op may run at once by
// PyTorch's own CPU kernel instead of being recorded for a program of XLA.
#pragma once

#include "execution/host_ops.h"
#include "recorder/call.h"
#include "recorder/record.h"

#include <ATen/core/stack.h>

namespace tpu {

// Which tier runs an op (TPU_TIERS): programs alone, whichever costs less, or CPU kernels wherever there
// is one.
enum class Tiers : uint8_t { Compiled, Auto, Host };
void set_tiers(Tiers tiers);
Tiers tiers();

// The CPU op that computes what an overload does, or null where there is none that may stand for it.
const c10::OperatorHandle* host_kernel(const OpDescription& d);
// Counts an op that runs on the host. Whether a program is under way by now, for the first time: Python's
// collector then looks at the objects of its start again (`resume_collector`, without g_mutex).
bool count_host_op();
void resume_collector();

// A call that the host can run at once.
class HostCall {
 public:
  HostCall(const OpDescription& d, const c10::IValue* args);
  // Whether there is a kernel for it.
  explicit operator bool() const { return kernel_ || function_; }
  // What the call returns, as tensors of the device, or nothing where the kernel has none of these dtypes;
  // `c` is what `gather` said of it. Throws what the CPU kernel throws. `lock` holds g_mutex, and is
  // released; the GIL is not held.
  std::optional<torch::jit::Stack> run(Call& c, Lock& lock) const;

 private:
  const OpDescription& d_;
  const c10::IValue* args_;
  const c10::OperatorHandle* kernel_;
  HostFunction function_ = nullptr;
};

}  // namespace tpu

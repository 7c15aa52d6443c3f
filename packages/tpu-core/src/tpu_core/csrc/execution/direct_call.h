// The short way of the host tier: a call whose operands lie ready on the host goes to PyTorch's CPU kernel with
// one look at the locked state, and no signature. All else takes the long way (host_kernels.h), for which
// nothing has happened then.
#pragma once

#include "execution/host_kernels.h"
#include "execution/host_memory.h"
#include "execution/small_pointwise.h"
#include "recorder/record.h"
#include "recorder/tier_key.h"
#include "recorder/trace.h"

#include <optional>
#include <utility>

namespace tpu {

// Keys of the dispatcher that come before a CPU kernel: autograd, and the CPU's autocast.
constexpr c10::DispatchKeySet kAboveKernels =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// Whether a tensor of the device or the CPU is dense and has no lazy bits, and no subclass or transform of
// PyTorch's is to see it.
inline bool is_plain_tensor(const at::Tensor& t) {
  constexpr c10::DispatchKeySet common(c10::DispatchKey::ADInplaceOrView);
  constexpr auto device = common |
      c10::DispatchKeySet(
                              {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1,
                               c10::DispatchKey::AutocastPrivateUse1});
  constexpr auto cpu =
      common |
      c10::DispatchKeySet(
          {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU});
  const auto keys = t.key_set();
  return (keys | device) == device || (keys | cpu) == cpu;
}

class DirectCall {
 public:
  // `takes_functions`: `run` is the one on a stack, where ops of ours may stand in for kernels (host_ops.h).
  DirectCall(const OpDescription& d, const c10::IValue* args, bool takes_functions = false);
  DirectCall(const DirectCall&) = delete;
  // Whether the call may be run; else it takes the long way.
  explicit operator bool() const { return is_ready_; }

  // The CPU tensors of operands on the device, in the order of the arguments, those of lists too.
  at::Tensor& operand(size_t i) { return operands_[i]; }

  // Runs the kernel; false where it has none for the dtypes, and the long way remains.
  template <typename Kernel>
  bool run(Kernel kernel) {
    const auto started = kernel_clock();
    try {
      const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
      kernel();
    } catch (const c10::NotImplementedError&) {
      give_up();
      return false;
    } catch (...) {
      give_up();
      throw;
    }
    trace_->tiering.took(kernel_clock() - started);
    if (is_first_) resume_collector();
    return true;
  }
  // Computes a pointwise op of small tensors, for `run`; false where the kernel is to. `args`: those of the call.
  bool compute_small(const c10::IValue* args, SmallResults& made) const {
    return d_.small && compute(*d_.small, args, operands_, made);
  }
  // The device tensor of its only result.
  at::Tensor result(at::Tensor t) const;
  // The same on a stack: puts results in place of arguments.
  bool run(torch::jit::Stack& stack);

 private:
  bool take(const at::Tensor& t, const ValuePtr& v, bool is_written, TierKey& key);
  bool begin(const Mode& m, Lock& lock);
  void give_up();
  c10::IValue on_host(const c10::IValue& v, size_t& next) const;
  bool put_small(const c10::IValue* args, torch::jit::Stack& stack, size_t first) const;

  const OpDescription& d_;
  const c10::IValue* args_;
  HostFunction function_ = nullptr;
  ThreefryKey drawn_{};
  std::optional<WithoutGil> no_gil_;
  Trace* trace_ = nullptr;
  uint64_t key_ = 0;
  int16_t device_ = -1;
  bool is_ready_ = false, is_differentiated_ = false, is_first_ = false;
  c10::SmallVector<at::Tensor, 6> operands_;
  // Operands by their place: views that are written, and values that are written for the first time.
  c10::SmallVector<std::pair<const c10::TensorImpl*, size_t>, 1> written_views_;
  c10::SmallVector<std::pair<size_t, Value*>, 1> unwritten_;
  Writing writing_;
};

}  // namespace tpu

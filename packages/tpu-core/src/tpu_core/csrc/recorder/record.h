// The boxed kernel of every ATen overload on the device: signature, metadata cache, trace.
#pragma once

#include "recorder/trace.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <optional>

namespace tpu {

struct Mode;
struct SmallPointwise;
struct ThreefryKey;

// How an argument of an overload enters its signature.
enum class Policy : uint8_t {
  Tensor,
  TensorList,
  Number,
  NumberList,
  Static,
  Drop,
  Generator,
  Integers
};

// What a number argument must lie between, both included; NaN lies nowhere.
struct Bounds {
  size_t argument;
  double least, most;
  int other = -1;  // the argument that is the upper bound
};

// Whether the CPU op may not stand for a call with these arguments.
using UnfitCall = bool (*)(const c10::IValue*);

// What the recorder knows of an overload; made by Python on the first call.
struct OpDescription {
  explicit OpDescription(const c10::OperatorHandle& handle) : op(handle) {}
  // Whether Python handles every call: no program has the op.
  bool has_handler() const { return handler && !handler.is_none(); }

  c10::OperatorHandle op;
  std::string name;
  Hash128 hash;
  std::vector<Policy> policies;  // one a schema argument
  bool takes_lists = false;      // of tensors
  // Another library has made it. Its kernel may be Python, do as it likes with its arguments, and
  // differentiate inside.
  bool is_foreign = false;
  std::vector<uint8_t> compiled_in;  // number arguments that are part of the signature
  std::vector<uint8_t> steady;       // numbers that are constants of programs until seen to vary
  std::vector<uint8_t> writes;       // arguments that are mutated
  bool write_only = false;           // mutated arguments are overwritten without being read
  std::vector<int> returns;  // >= 0: alias of that argument; -1: new tensor; -2: new list; -3: int
  bool random = false;
  int chance = -1;               // argument that is 0 where a call of a random op draws nothing
  bool scalar_operands = false;  // 0-d CPU tensors may stand for numbers
  bool host_operands = false;    // CPU tensors in lists (of indices) are moved to the device
  bool jax_settings = false;     // depends on the user's JAX settings
  bool precision = false;        // depends on the float32 matmul precision
  bool wide_numbers = false;     // float numbers travel in 64 bits
  bool divides = false;          // an integer divided by zero is an error
  bool window = false;           // puts a gradient where its numbers say
  bool fills = false;            // stores a number
  bool checks = false;           // values may be errors that a program finds (checks.h)
  std::vector<Bounds> bounds;    // of number arguments that PyTorch checks
  py::object python;             // the overload, passed back to Python on a miss
  py::object handler;            // set if Python handles every call
  // The CPU op that may stand for it (host_kernels.h), once looked for.
  mutable std::optional<c10::OperatorHandle> host;
  mutable UnfitCall is_unfit_for_host = nullptr;  // for some calls it may not
  mutable const SmallPointwise* small = nullptr;  // loops for small tensors (small_pointwise.h)
  // What of this project stands in for a CPU op (host_ops.h).
  mutable void (*function)(ThreefryKey, torch::jit::Stack&) = nullptr;
  mutable std::once_flag host_sought;
  // Whether its calls may take the short way to it (direct_call.h); -1 where that was not asked yet.
  mutable std::atomic<int> direct{-1};
};

OpDescription* describe_op(const c10::OperatorHandle& op);

// The description of a kernel's overload, asked for on its first call. Threads may make that call at once,
// and get the same.
class KnownDescription {
 public:
  KnownDescription() = default;
  KnownDescription(const KnownDescription& other) : known_(other.known_.load()) {}
  const OpDescription& of(const c10::OperatorHandle& op) {
    const auto* d = known_.load(std::memory_order_acquire);
    if (C10_UNLIKELY(!d)) {
      d = describe_op(op);
      known_.store(d, std::memory_order_release);
    }
    return *d;
  }

 private:
  std::atomic<const OpDescription*> known_{nullptr};
};

// Kernel object of one overload.
class Recorder final : public c10::OperatorKernel {
 public:
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  KnownDescription description_;
};

// What became of a call.
struct Recorded {
  const Signature* signature = nullptr;
  c10::SmallVector<at::Tensor, 4> fresh;     // its new tensors, lists flattened
  py::handle handler;                        // set where Python is to handle the call
  uint64_t op = 0;                           // its key among the ops of a tiers' segment
  std::optional<torch::jit::Stack> results;  // set where the call has run: what it returns
};
Recorded record_call(const OpDescription& d, const c10::IValue* args);
// Runs a call by a CPU kernel where its tier is the host's; false where it is to be recorded (host_tier.cpp).
bool run_on_host(const OpDescription& d, const c10::IValue* args, Recorded& recorded);
// An op of a trace runs on the host: it joins the tiers' segment, which ends after it where the mode cuts.
void enter_host_op(Trace& trace, const Mode& m, uint64_t op);
// Puts the results of a call that Python handles in place of its arguments.
void call_python(
    py::handle handler, const OpDescription& d, const c10::OperatorHandle& op,
    torch::jit::Stack* stack);
// Both, for arguments on a stack.
void record(const OpDescription& d, const c10::OperatorHandle& op, torch::jit::Stack* stack);
// `aten::copy_` between tensors of the device.
void record_copy(const at::Tensor& self, const at::Tensor& src, bool non_blocking);
// Whether a tensor among the arguments has PyTorch's lazy conjugate or negative bit. The fallbacks for
// these pass products of matrices on to the backend (ATen/ConjugateFallback.cpp).
bool has_lazy_bits(const c10::IValue* args, size_t n);
// `record` on tensors without those bits.
void record_resolved(
    const OpDescription& d, const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The slot of a value that a node reads. Uninitialised memory reads as zeros. Needs g_mutex.
uint32_t operand_slot(Trace* trace, Cell* cell, ValuePtr v, const Line& line);

// The kernel of an overload: a Recorder, or one that needs no boxing.
torch::CppFunction kernel_of(const c10::OperatorHandle& op);

}  // namespace tpu

// `scaled_dot_product_attention` stays one op, forward and backward, where PyTorch has a fused kernel on
// the CPU or on CUDA. It asks a dispatch stub for the kind of attention, not the op `_fused_sdp_choice`.
#include "execution/host_kernels.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

namespace tpu {
namespace {

bool broadcasts_to(at::SymIntArrayRef from, at::SymIntArrayRef to) {
  if (from.size() > to.size()) return false;
  for (size_t i = 0; i < from.size(); ++i) {
    const auto& n = from[from.size() - 1 - i];
    if (n != 1 && n != to[to.size() - 1 - i]) return false;
  }
  return true;
}

// Whether the one op takes these arguments. All others, wrong ones among them, go to the composite of
// plain ops, which raises PyTorch's errors.
bool one_op_takes(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, bool enable_gqa) {
  for (const at::Tensor* t : {&query, &key, &value}) {
    // torch.func's transforms differentiate and batch plain ops.
    const auto keys = t->key_set();
    if (t->dim() != 4 || keys.has(c10::DispatchKey::FuncTorchBatched) ||
        keys.has(c10::DispatchKey::FuncTorchGradWrapper) || t->is_nested() ||
        t->scalar_type() != query.scalar_type())
      return false;
  }
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  const bool heads_fit =
      k[1] == v[1] && (q[1] == k[1] || (enable_gqa && k[1] != 0 && q[1] % k[1] == 0));
  if (!heads_fit || q[0] != k[0] || q[0] != v[0] || q[3] != k[3] || k[2] != v[2]) return false;
  return !mask || !mask->defined() ||
      (mask->dim() > 1 && broadcasts_to(mask->sym_sizes(), {q[0], q[1], q[2], k[2]}));
}

// As of `use_flash_attention_cpp` (ATen/native/transformers/sdp_utils_cpp.cpp).
bool cpu_kernel_takes(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout) {
  if (dropout != 0 || query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  if (query.size(1) != key.size(1) || query.size(3) != key.size(3) ||
      query.size(3) != value.size(3))
    return false;
  for (const at::Tensor* t : {&query, &key, &value})
    if (t->numel() == 0 || t->stride(-1) != 1) return false;
  return !mask || !mask->defined() ||
      (!mask->requires_grad() && (mask->dim() == 2 || mask->dim() == 4));
}

int64_t fused_sdp_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool /*is_causal*/,
    std::optional<double> /*scale*/, bool enable_gqa) {
  const auto& context = at::globalContext();
  // CPU kernels and programs of the same ops, so that a segment may go from one to the other. What is
  // traced becomes a program.
  const bool is_traced = query.unsafeGetTensorImpl()->is_python_dispatch();
  if (tiers() != Tiers::Compiled && !is_traced && context.userEnabledMathSDP() &&
      !cpu_kernel_takes(query, key, value, mask, dropout))
    return static_cast<int64_t>(at::SDPBackend::math);
  const bool fused = context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() ||
      context.userEnabledOverrideableSDP();
  const bool one_op = fused && one_op_takes(query, key, value, mask, enable_gqa);
  TORCH_CHECK(
      one_op || context.userEnabledMathSDP(),
      "No viable backend for scaled_dot_product_attention was found. ",
      fused
          ? "The fused op does not take these shapes or dtypes, and SDPBackend.MATH is turned off."
          : "This is likely due to turning off both the math kernel and the fused kernels.");
  return static_cast<int64_t>(one_op ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_fused_sdp_choice", &fused_sdp_choice); }

}  // namespace tpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &tpu::fused_sdp_choice);
}  // namespace at::native

// Operands with PyTorch's lazy conjugate and negative bits: the op is recorded on tensors without them.
#include "recorder/record.h"

#include <ATen/Functions.h>

#include <utility>

namespace tpu {

bool has_lazy_bits(const c10::IValue* args, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (!args[i].isTensor()) continue;
    const auto& t = args[i].toTensor();
    if (t.defined() && (t.is_conj() || t.is_neg())) return true;
  }
  return false;
}

void record_resolved(
    const OpDescription& d, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Written {
    size_t argument;
    at::Tensor original, plain;
  };
  const size_t n = d.policies.size(), first = stack->size() - n;
  c10::SmallVector<Written, 2> written;
  for (size_t i = 0; i < n; ++i) {
    auto& v = (*stack)[first + i];
    if (!has_lazy_bits(&v, 1)) continue;
    const at::Tensor original = v.toTensor();
    at::Tensor plain = original;
    if (plain.is_conj()) plain = at::conj_physical(plain.conj());
    if (plain.is_neg()) plain = at::neg(plain._neg_view());
    v = plain;
    if (d.writes[i]) written.push_back({i, original, std::move(plain)});
  }
  record(d, op, stack);
  for (auto& w : written) {
    if (w.original.sizes() != w.plain.sizes()) w.original.resize_(w.plain.sizes());
    w.original.copy_(w.plain);
    for (size_t r = 0; r < d.returns.size(); ++r)
      if (d.returns[r] == static_cast<int>(w.argument)) (*stack)[first + r] = w.original;
  }
}

}  // namespace tpu

// CPU implementations of the ops that stand for several of ATen's on the device: attention, RMSNorm's
// gradient (`tpu_core.lowering.attention`), and ranges; the table has those of other files too.
#include "execution/host_ops.h"

#include "execution/recurrent.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using at::Tensor;
using torch::jit::Stack;

std::optional<double> scale_of(const c10::IValue& v) {
  return v.isNone() ? std::nullopt : std::optional(v.toScalar().toDouble());
}

std::optional<Tensor> mask_of(const c10::IValue& v) {
  const auto mask = optional(v);
  return mask.defined() ? std::optional(mask) : std::nullopt;
}

Tensor zero() {
  auto t = at::detail::empty_strided_cpu({}, {}, at::kLong);
  *t.mutable_data_ptr<int64_t>() = 0;
  return t;
}

// `fused_sdp_choice` sends here what the CPU's kernel takes.
void attention(ThreefryKey, Stack& s) {
  const auto q = s[0].toTensor(), k = s[1].toTensor();
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, s[2].toTensor(), 0.0, s[5].toBool(), mask_of(s[3]), scale_of(s[7]));
  s = {out, lse, Tensor(), Tensor(), q.size(-2), k.size(-2), zero(), zero(), Tensor()};
}

void attention_backward(ThreefryKey, Stack& s) {
  const auto wanted = s[5].toBoolList();
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      s[0].toTensor(), s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), s[6].toTensor(),
      s[7].toTensor(), 0.0, s[13].toBool(), mask_of(s[4]), scale_of(s[16]));
  const auto bias = optional(s[4]);
  const bool has_gradient = bias.defined() && bias.scalar_type() != at::kBool;
  s = {q, k, v, has_gradient ? at::zeros_like(bias) : Tensor()};
}

// The CPU computes RMSNorm's gradient by the formulas of several ops.
void fused_rms_norm_backward(ThreefryKey, Stack& s) {
  const auto grad_out = s[0].toTensor(), input = s[1].toTensor();
  const auto weight = optional(s[4]);
  const auto wanted = s[5].toBoolList();
  const auto outer = input.dim() - static_cast<int64_t>(s[2].toIntVector().size());
  const auto grad = wide(grad_out), x = wide(input);
  auto per_row = input.sizes().slice(0, outer).vec();
  per_row.resize(input.dim(), 1);
  const auto rstd =
      wide(s[3].toTensor()).reshape(per_row);  // saved without the dims by other backends
  const auto normalized = x * rstd;
  Tensor grad_input, grad_weight;
  if (wanted[0]) {
    std::vector<int64_t> dims(input.dim() - outer);
    std::iota(dims.begin(), dims.end(), outer);
    const auto scaled = weight.defined() ? grad * wide(weight) : grad;
    const auto along = input.numel() == 0 ? rstd : (scaled * normalized).mean(dims, true);
    grad_input = at::addcmul(scaled, normalized, along, -1).mul_(rstd).to(input.scalar_type());
  }
  if (wanted[1] && weight.defined()) {
    std::vector<int64_t> dims(outer);
    std::iota(dims.begin(), dims.end(), 0);
    grad_weight = grad * normalized;
    // No dims would be all of them.
    if (outer > 0) grad_weight = grad_weight.sum(dims);
    grad_weight = grad_weight.to(weight.scalar_type());
  }
  s = {grad_input, grad_weight};
}

// `self` becomes start, start + step, ...
void arange_(ThreefryKey, Stack& s) {
  auto out = s[0].toTensor();
  const auto start = s[1].toScalar(), step = s[2].toScalar();
  const auto n = out.numel();
  if (n == 0) {  // the ends that are worked out below would lie before the start
    s = {out};
    return;
  }
  if (at::isIntegralType(out.scalar_type(), false)) {
    const auto first = start.toLong(), by = step.toLong();
    if (by == 0) {  // a fraction that was cut
      out.fill_(first);
      return;
    }
    // One past the last: a whole step past it may be past all integers.
    at::arange_out(out, first, first + (n - 1) * by + (by < 0 ? -1 : 1), by);
    return;
  }
  // Half a step short of the end: the length is n, however the division is rounded, unless the half is
  // lost beside the start.
  const auto first = start.toDouble(), by = step.toDouble();
  const double end = first + (static_cast<double>(n) - 0.5) * by;
  if (std::ceil((end - first) / by) == static_cast<double>(n))
    at::arange_out(out, start, end, step);
  else out.copy_(at::arange(n, at::kDouble).mul_(by).add_(first).view(out.sizes()));
}

const std::unordered_map<std::string, HostFunction> kFunctions{
    {"aten::_scaled_dot_product_fused_attention_overrideable", attention},
    {"aten::_scaled_dot_product_fused_attention_overrideable_backward", attention_backward},
    {"aten::_fused_rms_norm_backward", fused_rms_norm_backward},
    {"aten::_thnn_fused_lstm_cell", fused_lstm_cell},
    {"aten::_thnn_fused_lstm_cell_backward_impl", fused_lstm_cell_backward},
    {"aten::_thnn_fused_gru_cell", fused_gru_cell},
    {"aten::_thnn_fused_gru_cell_backward", fused_gru_cell_backward},
    {"tpu::rnn_layer", rnn_layer},
    {"tpu::rnn_layer_backward", rnn_layer_backward},
    {"tpu::arange_", arange_},
};

}  // namespace

HostFunction host_function(const std::string& name) {
  const auto found = kFunctions.find(name);
  return found == kFunctions.end() ? nullptr : found->second;
}

bool draws(const OpDescription& d, const c10::IValue* args) {
  return d.random && (d.chance < 0 || args[d.chance].toDouble() != 0);
}

HostFunction function_of_call(const OpDescription& d, const c10::IValue* args) {
  if (!draws(d, args)) return d.function;
  return host_draw(d, args);
}

}  // namespace tpu

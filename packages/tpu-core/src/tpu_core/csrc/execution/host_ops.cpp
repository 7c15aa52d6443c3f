// CPU implementations of the ops that stand for several of ATen's on the device: attention, recurrent
// cells and layers (`tpu_core.lowering.attention`, `tpu_core.lowering.rnn`), and ranges.
#include "execution/host_ops.h"

#include <ATen/Functions.h>

#include <cmath>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using at::Tensor;
using torch::jit::Stack;

Tensor optional(const c10::IValue& v) { return v.isNone() ? Tensor() : v.toTensor(); }

std::optional<double> scale_of(const c10::IValue& v) {
  return v.isNone() ? std::nullopt : std::optional(v.toScalar().toDouble());
}

std::optional<Tensor> mask_of(const c10::IValue& v) {
  const auto mask = optional(v);
  return mask.defined() ? std::optional(mask) : std::nullopt;
}

// `fused_sdp_choice` sends here what the CPU's kernel takes.
void attention(ThreefryKey, Stack& s) {
  const auto q = s[0].toTensor(), k = s[1].toTensor();
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, s[2].toTensor(), 0.0, s[5].toBool(), mask_of(s[3]), scale_of(s[7]));
  const auto seed = at::zeros({}, at::kLong);
  s = {out, lse, Tensor(), Tensor(), q.size(-2), k.size(-2), seed, seed.clone(), Tensor()};
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

// --- recurrent cells, as of ATen's RNN.cu ---------------------------------------------------------

at::ScalarType wide_type(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}
Tensor wide(const Tensor& t) { return t.defined() ? t.to(wide_type(t)) : t; }
Tensor slope(const Tensor& sigmoid) { return sigmoid * (1 - sigmoid); }

// Hidden state, cell state and workspace.
std::vector<Tensor> lstm_cell(const Tensor& gates, const Tensor& cx) {
  const auto parts = gates.chunk(4, -1);
  const auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), c = parts[2].tanh(),
             o = parts[3].sigmoid();
  const auto cy = f * cx + i * c;
  return {o * cy.tanh(), cy, at::cat({i, f, c, o}, -1)};
}

// Gradients of the gates and of the cell state.
std::pair<Tensor, Tensor> lstm_cell_backward(
    const Tensor& grad_hy, const Tensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace) {
  const auto parts = workspace.chunk(4, -1);
  const auto &i = parts[0], &f = parts[1], &c = parts[2], &o = parts[3];
  const auto tanh_cy = cy.tanh();
  auto grad_c = grad_cy.defined() ? grad_cy : at::zeros_like(cx);
  auto grad_o = at::zeros_like(cx);
  if (grad_hy.defined()) {
    grad_o = grad_hy * tanh_cy;
    grad_c = grad_c + grad_hy * o * (1 - tanh_cy * tanh_cy);
  }
  auto gates = at::cat(
      {grad_c * c * slope(i), grad_c * cx * slope(f), grad_c * i * (1 - c * c), grad_o * slope(o)},
      -1);
  return {gates, grad_c * f};
}

std::pair<Tensor, Tensor> gru_cell(const Tensor& gates, const Tensor& hidden, const Tensor& hx) {
  const auto x = gates.chunk(3, -1), h = hidden.chunk(3, -1);
  const auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid();
  const auto n = (x[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, -1)};
}

// Gradients of both products and of the hidden state.
std::array<Tensor, 3> gru_cell_backward(const Tensor& grad, const Tensor& workspace) {
  const auto parts = workspace.chunk(5, -1);
  const auto &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const auto grad_z = grad * (hx - n) * slope(z);
  const auto grad_n = grad * (1 - z) * (1 - n * n);
  const auto grad_r = grad_n * hn * slope(r);
  return {
      at::cat({grad_r, grad_z, grad_n}, -1), at::cat({grad_r, grad_z, grad_n * r}, -1), grad * z};
}

void fused_lstm_cell(ThreefryKey, Stack& s) {
  const auto x = s[0].toTensor(), cx = s[2].toTensor();
  const auto b1 = optional(s[3]), b2 = optional(s[4]);
  auto gates = wide(x) + wide(s[1].toTensor());
  if (b1.defined()) gates = gates + (wide(b1) + wide(b2));
  const auto made = lstm_cell(gates, wide(cx));
  s = {made[0].to(cx.scalar_type()), made[1].to(cx.scalar_type()), made[2].to(x.scalar_type())};
}

void fused_lstm_cell_backward(ThreefryKey, Stack& s) {
  const auto grad_hy = wide(optional(s[0])), grad_cy = wide(optional(s[1]));
  const auto cx = s[2].toTensor(), workspace = s[4].toTensor();
  if (!grad_hy.defined() && !grad_cy.defined()) {
    s = {Tensor(), Tensor(), Tensor()};
    return;
  }
  auto [gates, grad_c] =
      lstm_cell_backward(grad_hy, grad_cy, wide(cx), wide(s[3].toTensor()), wide(workspace));
  const auto rounded = gates.to(workspace.scalar_type());
  const auto bias = s[5].toBool() ? rounded.sum(0, false) : Tensor();
  s = {rounded, grad_c.to(cx.scalar_type()), bias};
}

void fused_gru_cell(ThreefryKey, Stack& s) {
  const auto x = s[0].toTensor(), hx = s[2].toTensor();
  const auto b1 = optional(s[3]), b2 = optional(s[4]);
  auto gates = wide(x), hidden = wide(s[1].toTensor());
  if (b1.defined()) gates = gates + wide(b1), hidden = hidden + wide(b2);
  const auto [hy, workspace] = gru_cell(gates, hidden, wide(hx));
  s = {hy.to(hx.scalar_type()), workspace.to(hx.scalar_type())};
}

void fused_gru_cell_backward(ThreefryKey, Stack& s) {
  const auto workspace = s[1].toTensor();
  const auto dtype = workspace.scalar_type();
  const auto [input, hidden, hx] = gru_cell_backward(wide(s[0].toTensor()), wide(workspace));
  const auto gates = input.to(dtype), products = hidden.to(dtype);
  const bool has_bias = s[2].toBool();
  s = {
      gates, products, hx.to(dtype), has_bias ? gates.sum(0, false) : Tensor(),
      has_bias ? products.sum(0, false) : Tensor()};
}

// --- recurrent layers -----------------------------------------------------------------------------

// One direction of a layer: gates (T, N, gates), states (N, H).
void rnn_layer(ThreefryKey, Stack& s) {
  const auto gates = s[0].toTensor(), weight = s[3].toTensor(), bias = optional(s[4]);
  const auto hx = s[1].toTensor();
  const auto dtype = hx.scalar_type();
  const auto kind = s[5].toStringRef();
  const bool reverse = s[6].toBool();
  const int64_t steps = gates.size(0);
  std::vector<Tensor> ys(steps), cells(steps), kept(steps);
  auto h = hx, c = optional(s[2]);
  for (int64_t n = 0; n < steps; ++n) {
    const auto t = reverse ? steps - 1 - n : n;
    const auto x = wide(gates[t]);
    const auto hidden = wide(at::linear(h, weight, bias));
    if (kind == "lstm") {
      const auto made = lstm_cell(x + hidden, wide(c));
      c = cells[t] = made[1].to(dtype);
      h = made[0].to(dtype);
      kept[t] = made[2].to(dtype);
    } else if (kind == "gru") {
      const auto [hy, workspace] = gru_cell(x, hidden, wide(h));
      h = hy.to(dtype);
      kept[t] = workspace.to(dtype);
    } else {
      h = (kind == "tanh" ? (x + hidden).tanh() : (x + hidden).relu()).to(dtype);
    }
    ys[t] = h;
  }
  const auto none = at::empty({0}, hx.options());
  s = {
      at::stack(ys), kind == "lstm" ? at::stack(cells) : none,
      kind == "lstm" || kind == "gru" ? at::stack(kept) : none};
}

// The state that each time step began with.
Tensor states_before(const Tensor& states, const Tensor& first, bool reverse) {
  const auto n = states.size(0);
  if (reverse) return at::cat({states.slice(0, 1), first.unsqueeze(0)});
  return at::cat({first.unsqueeze(0), states.slice(0, 0, n - 1)});
}

void rnn_layer_backward(ThreefryKey, Stack& s) {
  const auto grad_ys = optional(s[0]), grad_cells = optional(s[1]), cx = optional(s[3]);
  const auto hx = s[2].toTensor(), weight = wide(s[4].toTensor()), ys = s[5].toTensor();
  const auto cells = s[6].toTensor(), workspace = s[7].toTensor();
  const auto kind = s[8].toStringRef();
  const bool reverse = s[9].toBool();
  const auto dtype = hx.scalar_type();
  const int64_t steps = ys.size(0);
  const auto cells_before = cx.defined() ? states_before(cells, cx, reverse) : Tensor();
  auto grad_h = at::zeros_like(wide(hx)), grad_c = kind == "lstm" ? grad_h.clone() : Tensor();
  std::vector<Tensor> of_gates(steps), of_products(steps);
  for (int64_t n = steps - 1; n >= 0; --n) {
    const auto t = reverse ? steps - 1 - n : n;
    const auto grad = grad_ys.defined() ? wide(grad_ys[t]) + grad_h : grad_h;
    if (kind == "lstm") {
      const auto of_c = grad_cells.defined() ? wide(grad_cells[t]) + grad_c : grad_c;
      std::tie(of_gates[t], grad_c) =
          lstm_cell_backward(grad, of_c, wide(cells_before[t]), wide(cells[t]), wide(workspace[t]));
      grad_h = at::mm(of_gates[t], weight);
    } else if (kind == "gru") {
      const auto found = gru_cell_backward(grad, wide(workspace[t]));
      of_gates[t] = found[0];
      of_products[t] = found[1];
      grad_h = at::mm(found[1], weight) + found[2];
    } else {
      const auto y = wide(ys[t]);
      of_gates[t] = grad * (kind == "tanh" ? 1 - y * y : (y > 0).to(y.scalar_type()));
      grad_h = at::mm(of_gates[t], weight);
    }
  }
  const auto gates = at::stack(of_gates).to(dtype);
  const auto products = kind == "gru" ? at::stack(of_products).to(dtype) : gates;
  const auto before = states_before(ys, hx, reverse);
  const auto grad_weight =
      at::mm(products.flatten(0, 1).t(), before.flatten(0, 1)).to(s[4].toTensor().scalar_type());
  const auto grad_bias = wide(products).sum(at::IntArrayRef({0, 1})).to(dtype);
  s = {
      gates, grad_h.to(dtype), kind == "lstm" ? grad_c.to(dtype) : at::empty({0}, hx.options()),
      grad_weight, grad_bias};
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
    {"aten::_thnn_fused_lstm_cell", fused_lstm_cell},
    {"aten::_thnn_fused_lstm_cell_backward_impl", fused_lstm_cell_backward},
    {"aten::_thnn_fused_gru_cell", fused_gru_cell},
    {"aten::_thnn_fused_gru_cell_backward", fused_gru_cell_backward},
    {"tpu::rnn_layer", rnn_layer},
    {"tpu::rnn_layer_backward", rnn_layer_backward},
    {"tpu::arange_", arange_},
};

}  // namespace

HostFunction host_function(const OpDescription& d) {
  const auto found = kFunctions.find(d.name);
  return found == kFunctions.end() ? nullptr : found->second;
}

}  // namespace tpu

// Recurrent cells and layers on the CPU (`tpu_core.lowering.rnn`).
#include "execution/recurrent.h"

#include "execution/small_recurrent.h"

#include <ATen/Functions.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using at::Tensor;
using torch::jit::Stack;

// Cells, as of ATen's RNN.cu.

// Hidden and cell state. The gates become the workspace: their activations, in their place.
std::pair<Tensor, Tensor> lstm_cell(const Tensor& gates, const Tensor& cx) {
  const auto parts = gates.chunk(4, -1);
  gates.narrow(-1, 0, 2 * cx.size(-1)).sigmoid_();
  parts[2].tanh_();
  parts[3].sigmoid_();
  const auto cy = (parts[1] * cx).addcmul_(parts[0], parts[2]);
  return {parts[3] * cy.tanh(), cy};
}

// Gradient of the cell state; those of the gates are written to `gates`.
Tensor lstm_cell_backward(
    const Tensor& grad_hy, const Tensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, const Tensor& gates) {
  const auto parts = workspace.chunk(4, -1);
  const auto &i = parts[0], &f = parts[1], &c = parts[2], &o = parts[3];
  auto grads = gates.chunk(4, -1);
  auto grad_c = grad_cy;
  if (grad_hy.defined()) {
    const auto tanh_cy = cy.tanh();
    at::sigmoid_backward_out(grads[3], grad_hy * tanh_cy, o);
    const auto of_hy = at::tanh_backward(grad_hy * o, tanh_cy);
    grad_c = grad_c.defined() ? grad_c + of_hy : of_hy;
  } else {
    grads[3].zero_();
  }
  at::sigmoid_backward_out(grads[0], grad_c * c, i);
  at::sigmoid_backward_out(grads[1], grad_c * cx, f);
  at::tanh_backward_out(grads[2], grad_c * i, c);
  return grad_c * f;
}

std::pair<Tensor, Tensor> gru_cell(const Tensor& gates, const Tensor& hidden, const Tensor& hx) {
  const auto width = hx.size(-1);
  const auto of_new = hidden.narrow(-1, 2 * width, width);
  const auto both = (gates.narrow(-1, 0, 2 * width) + hidden.narrow(-1, 0, 2 * width)).sigmoid_();
  const auto r = both.narrow(-1, 0, width), z = both.narrow(-1, width, width);
  const auto n = at::addcmul(gates.narrow(-1, 2 * width, width), r, of_new).tanh_();
  return {at::addcmul(n, z, hx - n), at::cat({both, n, hx, of_new}, -1)};
}

// Gradients of both products and of the hidden state.
std::array<Tensor, 3> gru_cell_backward(const Tensor& grad, const Tensor& workspace) {
  const auto parts = workspace.chunk(5, -1);
  const auto &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const auto grad_z = at::sigmoid_backward(grad * (hx - n), z);
  const auto grad_n = at::tanh_backward(grad * (1 - z), n);
  const auto grad_r = at::sigmoid_backward(grad_n * hn, r);
  return {
      at::cat({grad_r, grad_z, grad_n}, -1), at::cat({grad_r, grad_z, grad_n * r}, -1), grad * z};
}

// The state that each time step began with.
Tensor states_before(const Tensor& states, const Tensor& first, bool reverse) {
  const auto n = states.size(0);
  if (reverse) return at::cat({states.slice(0, 1), first.unsqueeze(0)});
  return at::cat({first.unsqueeze(0), states.slice(0, 0, n - 1)});
}

// Of a layer of any kind, dtype and size. `kept` is its workspace, or its results where it has none.
RecurrentGradients layer_gradients(
    const std::string& kind, const Tensor& grad_ys, const Tensor& grad_cells, const Tensor& hx,
    const Tensor& cx, const Tensor& weight, const Tensor& all_cells, const Tensor& workspace,
    bool reverse) {
  const int64_t steps = workspace.size(0);
  auto each = [&](const Tensor& t) {
    return t.defined() ? wide(t).unbind(0) : std::vector<Tensor>(steps);
  };
  const auto of_ys = each(grad_ys), of_cells = each(grad_cells), cells = each(all_cells);
  const auto kept = each(workspace);
  auto grad_h = at::zeros_like(wide(hx)), grad_c = kind == "lstm" ? grad_h.clone() : Tensor();
  const auto gates = at::empty({steps, hx.size(0), weight.size(0)}, weight.options());
  const auto products = kind == "gru" ? at::empty_like(gates) : gates;
  auto gates_of = gates.unbind(0), products_of = products.unbind(0);
  for (int64_t n = steps - 1; n >= 0; --n) {
    const auto t = reverse ? steps - 1 - n : n;
    const auto grad = of_ys[t].defined() ? of_ys[t] + grad_h : grad_h;
    if (kind == "lstm") {
      const auto of_c = of_cells[t].defined() ? of_cells[t] + grad_c : grad_c;
      const auto before = n == 0 ? wide(cx) : cells[reverse ? t + 1 : t - 1];
      grad_c = lstm_cell_backward(grad, of_c, before, cells[t], kept[t], gates_of[t]);
    } else if (kind == "gru") {
      const auto found = gru_cell_backward(grad, kept[t]);
      gates_of[t].copy_(found[0]);
      products_of[t].copy_(found[1]);
      grad_h = at::addmm(found[2], found[1], weight);
      continue;
    } else if (kind == "tanh") {
      at::tanh_backward_out(gates_of[t], grad, kept[t]);
    } else {
      at::threshold_backward_out(gates_of[t], grad, kept[t], 0);
    }
    grad_h = at::mm(gates_of[t], weight);
  }
  return {gates, products, grad_h, grad_c};
}

}  // namespace

void fused_lstm_cell(ThreefryKey, Stack& s) {
  const auto x = s[0].toTensor(), cx = s[2].toTensor();
  const auto b1 = optional(s[3]), b2 = optional(s[4]);
  auto gates = wide(x) + wide(s[1].toTensor());
  if (b1.defined()) gates = gates + (wide(b1) + wide(b2));
  const auto [hy, cy] = lstm_cell(gates, wide(cx));
  s = {hy.to(cx.scalar_type()), cy.to(cx.scalar_type()), gates.to(x.scalar_type())};
}

void fused_lstm_cell_backward(ThreefryKey, Stack& s) {
  const auto grad_hy = wide(optional(s[0])), grad_cy = wide(optional(s[1]));
  const auto cx = s[2].toTensor(), workspace = s[4].toTensor();
  if (!grad_hy.defined() && !grad_cy.defined()) {
    s = {Tensor(), Tensor(), Tensor()};
    return;
  }
  const auto activated = wide(workspace);
  const auto gates = at::empty(activated.sizes(), activated.options());
  const auto grad_c =
      lstm_cell_backward(grad_hy, grad_cy, wide(cx), wide(s[3].toTensor()), activated, gates);
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

// One direction of a layer: gates (T, N, gates), states (N, H).
void rnn_layer(ThreefryKey, Stack& s) {
  auto gates = s[0].toTensor();
  const auto hx = s[1].toTensor(), weight = s[3].toTensor().t();
  const auto bias = optional(s[4]);
  const auto dtype = hx.scalar_type();
  const auto kind = s[5].toStringRef();
  const bool reverse = s[6].toBool();
  const int64_t steps = gates.size(0);
  const auto none = at::empty({0}, hx.options());
  const auto cx = optional(s[2]);
  if (is_small_recurrent(kind, {hx, gates, cx, weight, bias})) {
    if (kind == "lstm" && bias.defined()) gates = gates + bias;
    const auto [ys, cells, workspace] = kind == "lstm"
        ? small_lstm(gates, hx, cx, weight, reverse)
        : small_gru(gates, hx, weight, bias, reverse);
    s = {ys, cells.defined() ? cells : none, workspace};
    return;
  }
  // Where nothing is rounded between product and sum, the product adds to the gates.
  const bool is_sum = kind != "gru" && dtype == wide_type(hx) && gates.scalar_type() == dtype;
  if (is_sum && bias.defined()) gates = gates + bias;
  const auto xs = wide(gates).unbind(0);
  std::vector<Tensor> ys(steps), cells(steps), kept(steps);
  auto h = hx, c = cx;
  auto product = [&] { return wide(bias.defined() ? at::addmm(bias, h, weight) : h.mm(weight)); };
  auto sum = [&](const Tensor& x) { return is_sum ? at::addmm(x, h, weight) : x + product(); };
  for (int64_t n = 0; n < steps; ++n) {
    const auto t = reverse ? steps - 1 - n : n;
    if (kind == "lstm") {
      const auto activated = sum(xs[t]);
      const auto [hy, cy] = lstm_cell(activated, wide(c));
      c = cells[t] = cy.to(dtype);
      h = hy.to(dtype);
      kept[t] = activated.to(dtype);
    } else if (kind == "gru") {
      const auto [hy, workspace] = gru_cell(xs[t], product(), wide(h));
      h = hy.to(dtype);
      kept[t] = workspace.to(dtype);
    } else {
      auto y = sum(xs[t]);
      h = (kind == "tanh" ? y.tanh_() : y.relu_()).to(dtype);
    }
    ys[t] = h;
  }
  s = {
      at::stack(ys), kind == "lstm" ? at::stack(cells) : none,
      kind == "lstm" || kind == "gru" ? at::stack(kept) : none};
}

void rnn_layer_backward(ThreefryKey, Stack& s) {
  const auto grad_ys = optional(s[0]), grad_cells = optional(s[1]), cx = optional(s[3]);
  const auto hx = s[2].toTensor(), weight = wide(s[4].toTensor()), ys = s[5].toTensor();
  const auto cells = s[6].toTensor(), workspace = s[7].toTensor();
  const auto kind = s[8].toStringRef();
  const bool reverse = s[9].toBool();
  const auto dtype = hx.scalar_type();
  RecurrentGradients grads;
  if (is_small_recurrent(kind, {hx, grad_ys, grad_cells, cx, s[4].toTensor(), workspace}))
    grads = kind == "lstm"
        ? small_lstm_backward(grad_ys, grad_cells, cx, weight, cells, workspace, reverse)
        : small_gru_backward(grad_ys, weight, workspace, reverse);
  else
    grads = layer_gradients(
        kind, grad_ys, grad_cells, hx, cx, weight, cells,
        kind == "lstm" || kind == "gru" ? workspace : ys, reverse);
  const auto gates = grads.gates.to(dtype), products = grads.products.to(dtype);
  const auto grad_bias = wide(products).sum(at::IntArrayRef({0, 1})).to(dtype);
  const auto before = states_before(ys, hx, reverse);
  const auto grad_weight =
      at::mm(products.flatten(0, 1).t(), before.flatten(0, 1)).to(s[4].toTensor().scalar_type());
  s = {
      gates, grads.hx.to(dtype), kind == "lstm" ? grads.cx.to(dtype) : at::empty({0}, hx.options()),
      grad_weight, grad_bias};
}

}  // namespace tpu

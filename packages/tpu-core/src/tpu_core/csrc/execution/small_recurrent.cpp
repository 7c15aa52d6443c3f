// LSTM and GRU layers of small states, where each op of a step costs more than it computes: a product and the
// activations are ops of ATen's, the sums between them loops. Results are those of recurrent.cpp but for
// rounding.
#include "execution/small_recurrent.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace tpu {
namespace {

using at::Tensor;

// The most numbers of a state for which the loops are faster.
constexpr int64_t kMost = 4096;

float* data(const Tensor& t) { return t.mutable_data_ptr<float>(); }
// Null where there is no such tensor.
const float* floats(const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }
Tensor contiguous(const Tensor& t) { return t.defined() ? t.contiguous() : t; }
// Row `row` of rows of `width` numbers.
template <typename T>
T* at_row(T* first, int64_t row, int64_t width) {
  return first ? first + row * width : nullptr;
}
float value(const float* row, int64_t i) { return row ? row[i] : 0.0f; }

}  // namespace

bool is_small_recurrent(const std::string& kind, std::initializer_list<Tensor> tensors) {
  return (kind == "lstm" || kind == "gru") && tensors.begin()->numel() <= kMost &&
      std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) {
           return !t.defined() || t.scalar_type() == at::kFloat;
         });
}

RecurrentResults small_lstm(
    const Tensor& gates, const Tensor& hx, const Tensor& cx, const Tensor& weight, bool reverse) {
  const auto steps = gates.size(0), batch = hx.size(0), width = hx.size(1);
  const auto options = hx.options();
  const auto ys = at::empty({steps, batch, width}, options), cells = at::empty_like(ys);
  const auto kept = at::empty({steps, batch, 4 * width}, options);
  auto sums = at::empty({batch, 4 * width}, options);
  const auto sigmoids = at::empty({batch, 3 * width}, options);
  const auto tanhs = at::empty({batch, width}, options);
  const auto first = cx.contiguous();
  const auto* sum = floats(sums);
  const auto* before = floats(first);
  auto *of_sigmoid = data(sigmoids), *of_tanh = data(tanhs);
  auto h = hx;
  for (int64_t n = 0; n < steps; ++n) {
    const auto t = reverse ? steps - 1 - n : n;
    at::addmm_out(sums, gates.select(0, t), h, weight);
    for (int64_t row = 0; row < batch; ++row) {
      const auto* from = at_row(sum, row, 4 * width);
      auto* to = at_row(of_sigmoid, row, 3 * width);
      to = std::copy_n(from, 2 * width, to);
      std::copy_n(from + 3 * width, width, to);
      std::copy_n(from + 2 * width, width, at_row(of_tanh, row, width));
    }
    sigmoids.sigmoid_();
    tanhs.tanh_();
    auto* c = at_row(data(cells), t * batch, width);
    for (int64_t row = 0; row < batch; ++row) {
      const auto* i_f_o = at_row(of_sigmoid, row, 3 * width);
      const auto* g = at_row(of_tanh, row, width);
      for (int64_t i = 0; i < width; ++i)
        c[row * width + i] = i_f_o[width + i] * before[row * width + i] + i_f_o[i] * g[i];
      auto* to = at_row(data(kept), t * batch + row, 4 * width);
      to = std::copy_n(i_f_o, 2 * width, to);
      to = std::copy_n(g, width, to);
      std::copy_n(i_f_o + 2 * width, width, to);
    }
    std::copy_n(c, batch * width, of_tanh);
    tanhs.tanh_();
    auto* y = at_row(data(ys), t * batch, width);
    for (int64_t row = 0; row < batch; ++row) {
      const auto* o = at_row(of_sigmoid, row, 3 * width) + 2 * width;
      for (int64_t i = 0; i < width; ++i) y[row * width + i] = o[i] * of_tanh[row * width + i];
    }
    h = ys.select(0, t);
    before = c;
  }
  return {ys, cells, kept};
}

RecurrentResults small_gru(
    const Tensor& gates, const Tensor& hx, const Tensor& weight, const Tensor& bias, bool reverse) {
  const auto steps = gates.size(0), batch = hx.size(0), width = hx.size(1);
  const auto options = hx.options();
  const auto x = gates.contiguous(), first = hx.contiguous();
  const auto ys = at::empty({steps, batch, width}, options);
  const auto kept = at::empty({steps, batch, 5 * width}, options);
  auto products = at::empty({batch, 3 * width}, options);
  const auto sigmoids = at::empty({batch, 2 * width}, options);
  const auto tanhs = at::empty({batch, width}, options);
  const auto *product = floats(products), *before = floats(first);
  auto *both = data(sigmoids), *of_new = data(tanhs);
  auto h = first;
  for (int64_t n = 0; n < steps; ++n) {
    const auto t = reverse ? steps - 1 - n : n;
    if (bias.defined()) at::addmm_out(products, bias, h, weight);
    else at::mm_out(products, h, weight);
    for (int64_t row = 0; row < batch; ++row) {
      const auto* input = at_row(floats(x), t * batch + row, 3 * width);
      const auto* hidden = at_row(product, row, 3 * width);
      auto* to = at_row(both, row, 2 * width);
      for (int64_t i = 0; i < 2 * width; ++i) to[i] = input[i] + hidden[i];
    }
    sigmoids.sigmoid_();
    for (int64_t row = 0; row < batch; ++row) {
      const auto* input = at_row(floats(x), t * batch + row, 3 * width) + 2 * width;
      const auto* hidden = at_row(product, row, 3 * width) + 2 * width;
      const auto* r = at_row(both, row, 2 * width);
      auto* to = at_row(of_new, row, width);
      for (int64_t i = 0; i < width; ++i) to[i] = input[i] + r[i] * hidden[i];
    }
    tanhs.tanh_();
    auto* y = at_row(data(ys), t * batch, width);
    for (int64_t row = 0; row < batch; ++row) {
      const auto* r_z = at_row(both, row, 2 * width);
      const auto* new_ = at_row(of_new, row, width);
      const auto* old = at_row(before, row, width);
      for (int64_t i = 0; i < width; ++i)
        y[row * width + i] = new_[i] + r_z[width + i] * (old[i] - new_[i]);
      auto* to = at_row(data(kept), t * batch + row, 5 * width);
      to = std::copy_n(r_z, 2 * width, to);
      to = std::copy_n(new_, width, to);
      to = std::copy_n(old, width, to);
      std::copy_n(at_row(product, row, 3 * width) + 2 * width, width, to);
    }
    h = ys.select(0, t);
    before = y;
  }
  return {ys, Tensor(), kept};
}

RecurrentGradients small_lstm_backward(
    const Tensor& grad_ys, const Tensor& grad_cells, const Tensor& cx, const Tensor& weight,
    const Tensor& cells, const Tensor& workspace, bool reverse) {
  const auto steps = cells.size(0), batch = cells.size(1), width = cells.size(2);
  const auto of_ys = contiguous(grad_ys), of_cells = contiguous(grad_cells);
  const auto first = cx.contiguous(), kept = workspace.contiguous(), all = cells.contiguous();
  const auto activated = all.tanh();
  const auto gates = at::empty({steps, batch, 4 * width}, cells.options());
  auto grad_h = at::zeros({batch, width}, cells.options());
  const auto grad_c = at::zeros_like(grad_h);
  for (int64_t n = steps - 1; n >= 0; --n) {
    const auto t = reverse ? steps - 1 - n : n;
    const auto* before =
        n == 0 ? floats(first) : at_row(floats(all), (reverse ? t + 1 : t - 1) * batch, width);
    for (int64_t row = 0; row < batch; ++row) {
      const auto place = t * batch + row;
      const auto* parts = at_row(floats(kept), place, 4 * width);
      const auto *i = parts, *f = parts + width, *g = parts + 2 * width, *o = parts + 3 * width;
      const auto* tanh_c = at_row(floats(activated), place, width);
      const auto *of_y = at_row(floats(of_ys), place, width),
                 *of_c = at_row(floats(of_cells), place, width);
      auto* to = at_row(data(gates), place, 4 * width);
      auto* carried = at_row(data(grad_c), row, width);
      const auto *from = at_row(floats(grad_h), row, width), *old = at_row(before, row, width);
      for (int64_t k = 0; k < width; ++k) {
        const float grad = value(of_y, k) + from[k];
        const float c = value(of_c, k) + carried[k] + grad * o[k] * (1 - tanh_c[k] * tanh_c[k]);
        to[k] = c * g[k] * i[k] * (1 - i[k]);
        to[width + k] = c * old[k] * f[k] * (1 - f[k]);
        to[2 * width + k] = c * i[k] * (1 - g[k] * g[k]);
        to[3 * width + k] = grad * tanh_c[k] * o[k] * (1 - o[k]);
        carried[k] = c * f[k];
      }
    }
    at::mm_out(grad_h, gates.select(0, t), weight);
  }
  return {gates, gates, grad_h, grad_c};
}

RecurrentGradients small_gru_backward(
    const Tensor& grad_ys, const Tensor& weight, const Tensor& workspace, bool reverse) {
  const auto kept = workspace.contiguous(), of_ys = contiguous(grad_ys);
  const auto steps = kept.size(0), batch = kept.size(1), width = kept.size(2) / 5;
  const auto gates = at::empty({steps, batch, 3 * width}, kept.options());
  const auto products = at::empty_like(gates);
  auto grad_h = at::zeros({batch, width}, kept.options());
  const auto direct = at::empty_like(grad_h);
  for (int64_t n = steps - 1; n >= 0; --n) {
    const auto t = reverse ? steps - 1 - n : n;
    for (int64_t row = 0; row < batch; ++row) {
      const auto place = t * batch + row;
      const auto* parts = at_row(floats(kept), place, 5 * width);
      const auto *r = parts, *z = parts + width, *new_ = parts + 2 * width;
      const auto *old = parts + 3 * width, *product = parts + 4 * width;
      const auto *of_y = at_row(floats(of_ys), place, width),
                 *from = at_row(floats(grad_h), row, width);
      auto *gate = at_row(data(gates), place, 3 * width),
           *to = at_row(data(products), place, 3 * width);
      auto* kept_part = at_row(data(direct), row, width);
      for (int64_t k = 0; k < width; ++k) {
        const float grad = value(of_y, k) + from[k];
        const float of_new = grad * (1 - z[k]) * (1 - new_[k] * new_[k]);
        gate[k] = to[k] = of_new * product[k] * r[k] * (1 - r[k]);
        gate[width + k] = to[width + k] = grad * (old[k] - new_[k]) * z[k] * (1 - z[k]);
        gate[2 * width + k] = of_new;
        to[2 * width + k] = of_new * r[k];
        kept_part[k] = grad * z[k];
      }
    }
    at::addmm_out(grad_h, direct, products.select(0, t), weight);
  }
  return {gates, products, grad_h, Tensor()};
}

}  // namespace tpu

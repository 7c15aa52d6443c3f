// Recurrent layers of small states in float32 on the CPU; see small_recurrent.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>

namespace tpu {

// Whether a layer is computed here: for an LSTM or GRU of which all tensors that are given are float32, and
// the state is small.
bool is_small_recurrent(const std::string& kind, std::initializer_list<at::Tensor> tensors);

// Of one direction of a layer (`tpu::rnn_layer`).
struct RecurrentResults {
  at::Tensor ys, cells, workspace;
};
RecurrentResults small_lstm(
    const at::Tensor& gates, const at::Tensor& hx, const at::Tensor& cx, const at::Tensor& weight,
    bool reverse);
RecurrentResults small_gru(
    const at::Tensor& gates, const at::Tensor& hx, const at::Tensor& weight, const at::Tensor& bias,
    bool reverse);

// Gradients of the gates, of the products with the hidden state, and of the first states.
struct RecurrentGradients {
  at::Tensor gates, products, hx, cx;
};
RecurrentGradients small_lstm_backward(
    const at::Tensor& grad_ys, const at::Tensor& grad_cells, const at::Tensor& cx,
    const at::Tensor& weight, const at::Tensor& cells, const at::Tensor& workspace, bool reverse);
RecurrentGradients small_gru_backward(
    const at::Tensor& grad_ys, const at::Tensor& weight, const at::Tensor& workspace, bool reverse);

}  // namespace tpu

// CPU implementations of recurrent cells and layers; see recurrent.cpp.
#pragma once

#include "execution/threefry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace tpu {

// A tensor argument that may be left out.
inline at::Tensor optional(const c10::IValue& v) {
  return v.isNone() ? at::Tensor() : v.toTensor();
}
// The dtype that 16-bit floats are computed in; others are computed in their own.
inline at::ScalarType wide_type(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}
inline at::Tensor wide(const at::Tensor& t) { return t.defined() ? t.to(wide_type(t)) : t; }

// `HostFunction`s of the ops of these names.
void fused_lstm_cell(ThreefryKey, torch::jit::Stack& s);
void fused_lstm_cell_backward(ThreefryKey, torch::jit::Stack& s);
void fused_gru_cell(ThreefryKey, torch::jit::Stack& s);
void fused_gru_cell_backward(ThreefryKey, torch::jit::Stack& s);
void rnn_layer(ThreefryKey, torch::jit::Stack& s);
void rnn_layer_backward(ThreefryKey, torch::jit::Stack& s);

}  // namespace tpu

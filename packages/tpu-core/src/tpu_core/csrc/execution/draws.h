// What the random ops of the host tier are made of: numbers from the bits of an element, as programs make them
// (`tpu_core.lowering.random`).
#pragma once

#include "execution/threefry.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/stack.h>
#include <ATen/native/Math.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_map>

namespace tpu {

// Calls f(index, words) for each element.
template <typename F>
void each_element(ThreefryKey key, int64_t n, F f) {
  constexpr int64_t kBlock = kThreefryBlock;
  at::parallel_for(0, (n + kBlock - 1) / kBlock, 256, [&](int64_t begin, int64_t end) {
    std::array<uint32_t, kThreefryBlock> high, low;
    for (int64_t b = begin; b < end; ++b) {
      threefry_block(key, static_cast<uint64_t>(b * kBlock), high.data(), low.data());
      const int64_t count = std::min(kBlock, n - b * kBlock);
      for (int64_t i = 0; i < count; ++i) f(b * kBlock + i, Words{high[i], low[i]});
    }
  });
}

// An independent key for the n-th draw of a call.
inline ThreefryKey fold_in(ThreefryKey key, uint32_t n) {
  const auto w = threefry2x32(key, 0xFFFFFFFF, n);
  return {w.high, w.low};
}

inline uint64_t bits64(Words w) { return static_cast<uint64_t>(w.high) << 32 | w.low; }

// Fills a tensor of T with f(words), by way of contiguous memory.
template <typename T, typename F>
void fill(const at::Tensor& out, ThreefryKey key, F f) {
  auto target = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  T* data = target.mutable_data_ptr<T>();
  each_element(key, out.numel(), [&](int64_t i, Words w) { data[i] = static_cast<T>(f(w)); });
  if (!out.is_contiguous()) out.copy_(target);
}

// Digits of the mantissa, the hidden one included.
template <typename T>
constexpr int digits_of() {
  if (std::is_same_v<T, double>) return 53;
  if (std::is_same_v<T, float>) return 24;
  return std::is_same_v<T, at::Half> ? 11 : 8;
}
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
T uniform01(Words w) {
  constexpr int digits = digits_of<T>();
  const Wide<T> value = digits > 32 ? static_cast<Wide<T>>(bits64(w) >> (64 - digits))
                                    : static_cast<Wide<T>>(w.high >> (32 - digits % 32));
  return static_cast<T>(value * static_cast<Wide<T>>(std::ldexp(1.0, -digits)));
}

// Uniform in (0, 1], for logarithms.
template <typename W>
W open_uniform(Words w) {
  if constexpr (std::is_same_v<W, double>)
    return (static_cast<double>(bits64(w)) + 0.5) * std::ldexp(1.0, -64);
  else return (static_cast<float>(w.high) + 0.5f) * 0x1p-32f;
}

// Standard exponential, never 0.
template <typename W>
W exponential_of(Words w) {
  return std::max(-std::log(open_uniform<W>(w)), std::numeric_limits<W>::epsilon() / 2);
}

inline double standard_normal(Words w, double) {
  const double value = static_cast<double>(bits64(w) >> 11) + 0.5;
  return std::sqrt(2.0) * calc_erfinv(value * 0x1p-52 - 1.0);
}

// Giles, "Approximating the erfinv function" (2010), single precision, highest power first.
inline constexpr std::array<float, 9> kCentral{2.81022636e-08f,  3.43273939e-07f, -3.5233877e-06f,
                                               -4.39150654e-06f, 0.00021858087f,  -0.00125372503f,
                                               -0.00417768164f,  0.246640727f,    1.50140941f};
inline constexpr std::array<float, 9> kTail{-0.000200214257f, 0.000100950558f, 0.00134934322f,
                                            -0.00367342844f,  0.00573950773f,  -0.0076224613f,
                                            0.00943887047f,   1.00167406f,     2.83297682f};

inline float standard_normal(Words w, float) {
  const float tail = (static_cast<float>(w.high >> 1) + 0.5f) * 0x1p-32f;
  const float depth = -std::log(4.0f * tail * (1.0f - tail));
  const bool central = depth < 5.0f;
  const float s = central ? depth - 2.5f : std::sqrt(depth) - 3.0f;
  const auto& series = central ? kCentral : kTail;
  float value = series[0];
  for (size_t i = 1; i < series.size(); ++i) value = value * s + series[i];
  value = value * (1.0f - 2.0f * tail) * static_cast<float>(M_SQRT2);
  return w.high & 1 ? -value : value;
}

// Calls f with a value of the C++ type of a real floating dtype; false for others.
template <typename F>
bool with_float(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat: f(float{}); return true;
    case at::kDouble: f(double{}); return true;
    case at::kHalf: f(at::Half{}); return true;
    case at::kBFloat16: f(at::BFloat16{}); return true;
    default: return false;
  }
}

// As `with_float`, for all real dtypes that random ops fill.
template <typename F>
bool with_real(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kLong: f(int64_t{}); return true;
    case at::kInt: f(int32_t{}); return true;
    case at::kShort: f(int16_t{}); return true;
    case at::kChar: f(int8_t{}); return true;
    case at::kByte: f(uint8_t{}); return true;
    case at::kBool: f(bool{}); return true;
    default: return with_float(dtype, f);
  }
}

// Calls f(part, key, is_real) for the real and the imaginary part of a tensor; false for real tensors.
template <typename F>
bool each_part(const at::Tensor& x, ThreefryKey key, F f) {
  if (x.scalar_type() != at::kComplexFloat && x.scalar_type() != at::kComplexDouble) return false;
  const auto parts = at::view_as_real(x);
  for (const uint32_t i : {0, 1}) f(parts.select(-1, i), fold_in(key, i), i == 0);
  return true;
}

// Fills the first argument of a call with what f(W{}), a function of an element's bits, computes in W.
template <typename F>
void fill_real(torch::jit::Stack& stack, ThreefryKey key, F f) {
  const auto out = stack[0].toTensor();
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    fill<T>(out, key, f(Wide<T>{}));
  });
}

inline bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
      dtype == at::kBFloat16;
}

// A random op: whether it takes a call, and what it draws. Arguments are CPU tensors by then.
struct Draw {
  bool (*takes)(c10::ArrayRef<c10::IValue> args);
  void (*run)(ThreefryKey key, torch::jit::Stack& stack);
};

inline bool takes_real(c10::ArrayRef<c10::IValue> args) {
  return is_real(args[0].toTensor().scalar_type());
}
inline bool takes_real_or_complex(c10::ArrayRef<c10::IValue> args) {
  const auto dtype = args[0].toTensor().scalar_type();
  return is_real(dtype) || dtype == at::kComplexFloat || dtype == at::kComplexDouble;
}

using Draws = std::unordered_map<std::string, Draw>;
// Named distributions and permutations (host_distributions.cpp).
const Draws& distribution_draws();
// Integers and samples of categories (host_random_integers.cpp).
const Draws& integer_draws();

}  // namespace tpu

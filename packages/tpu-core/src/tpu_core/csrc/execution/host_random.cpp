// Random ops of the host tier. PyTorch's CPU kernels draw from another generator; these give the numbers
// that programs give, from the same seed and offset (`tpu_core.lowering.random`, `random_integers`).
#include "execution/host_ops.h"

#include "execution/threefry.h"
#include "values/device.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/native/Math.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tpu {
namespace {

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

uint64_t bits64(Words w) { return static_cast<uint64_t>(w.high) << 32 | w.low; }

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

double standard_normal(Words w, double) {
  const double value = static_cast<double>(bits64(w) >> 11) + 0.5;
  return std::sqrt(2.0) * calc_erfinv(value * 0x1p-52 - 1.0);
}

// Giles, "Approximating the erfinv function" (2010), single precision, highest power first.
constexpr std::array<float, 9> kCentral{2.81022636e-08f,  3.43273939e-07f, -3.5233877e-06f,
                                        -4.39150654e-06f, 0.00021858087f,  -0.00125372503f,
                                        -0.00417768164f,  0.246640727f,    1.50140941f};
constexpr std::array<float, 9> kTail{-0.000200214257f, 0.000100950558f, 0.00134934322f,
                                     -0.00367342844f,  0.00573950773f,  -0.0076224613f,
                                     0.00943887047f,   1.00167406f,     2.83297682f};

float standard_normal(Words w, float) {
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

// What an element's 32 bits are below with the probability p.
template <typename W>
struct Threshold {
  explicit Threshold(W p) : always(p >= 1) {
    constexpr W most = 1 - std::numeric_limits<W>::epsilon() / 2;
    // A NaN converts to 0, as XLA has it.
    const W clipped = std::isnan(p) ? W(0) : std::clamp(p, W(0), most);
    bits = static_cast<uint32_t>(clipped * static_cast<W>(0x1p32));
  }
  bool operator()(Words w) const { return always || w.high < bits; }

  bool always;
  uint32_t bits;
};

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

bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
      dtype == at::kBFloat16;
}

// A random op: whether it takes a call, and what it draws. Arguments are CPU tensors by then.
struct Draw {
  bool (*takes)(c10::ArrayRef<c10::IValue> args);
  void (*run)(ThreefryKey key, torch::jit::Stack& stack);
};

bool takes_real(c10::ArrayRef<c10::IValue> args) {
  return is_real(args[0].toTensor().scalar_type());
}

void uniform_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto low = static_cast<Wide<T>>(stack[1].toDouble());
    const auto high = static_cast<Wide<T>>(stack[2].toDouble());
    fill<T>(out, key, [=](Words w) {
      const T value = static_cast<T>(static_cast<Wide<T>>(uniform01<T>(w)) * (high - low) + low);
      return value == static_cast<T>(high) ? static_cast<T>(low) : value;
    });
  });
}

void normal_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto mean = static_cast<Wide<T>>(stack[1].toDouble());
    const auto std = static_cast<Wide<T>>(stack[2].toDouble());
    fill<T>(out, key, [=](Words w) {
      return static_cast<T>(standard_normal(w, Wide<T>{}) * std + mean);
    });
  });
}

// Of means and standard deviations, one of which may be a number.
void normal(ThreefryKey key, torch::jit::Stack& stack) {
  const bool both = stack[0].isTensor() && stack[1].isTensor();
  const auto like = (stack[0].isTensor() ? stack[0] : stack[1]).toTensor();
  const auto shape =
      both ? at::infer_size(like.sizes(), stack[1].toTensor().sizes()) : like.sizes().vec();
  auto out = at::empty(shape, like.options());
  with_float(like.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto each = [&](const c10::IValue& v) {
      const auto x = v.isTensor() ? v.toTensor() : at::scalar_tensor(v.toDouble(), at::kDouble);
      return x.to(c10::CppTypeToScalarType<W>::value).expand(shape).contiguous();
    };
    const auto means = each(stack[0]), stds = each(stack[1]);
    const W *mean = means.template const_data_ptr<W>(), *std = stds.template const_data_ptr<W>();
    T* to = out.mutable_data_ptr<T>();
    each_element(key, out.numel(), [&](int64_t i, Words w) {
      TORCH_CHECK(std[i] >= 0, "normal expects all elements of std >= 0.0");
      to[i] = static_cast<T>(standard_normal(w, W{}) * std[i] + mean[i]);
    });
  });
  stack = {out};
}

bool takes_normal(c10::ArrayRef<c10::IValue> args) {
  const auto real = [](const c10::IValue& v) {
    return !v.isTensor() || is_real(v.toTensor().scalar_type());
  };
  return real(args[0]) && real(args[1]) &&
      (!args[0].isTensor() || !args[1].isTensor() ||
       args[0].toTensor().scalar_type() == args[1].toTensor().scalar_type());
}

void exponential_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto rate = static_cast<W>(stack[1].toDouble());
    constexpr W least = std::numeric_limits<W>::epsilon() / 2;
    fill<T>(out, key, [=](Words w) {
      return static_cast<T>(std::max(-std::log(open_uniform<W>(w)), least) / rate);
    });
  });
}

void bernoulli_float(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  const Threshold<float> below(static_cast<float>(stack[1].toDouble()));
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    fill<T>(out, key, [=](Words w) { return below(w) ? T(1) : T(0); });
  });
}

// 1 where an element of `p` says so; contiguous.
template <typename T>
at::Tensor bernoulli_of(ThreefryKey key, const at::Tensor& p) {
  auto out = at::empty(p.sizes(), p.options());
  const auto given = p.contiguous();
  const T* from = given.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  each_element(key, p.numel(), [&](int64_t i, Words w) {
    const auto p_in = static_cast<Wide<T>>(from[i]);
    TORCH_CHECK(p_in >= 0 && p_in <= 1);  // the text is that of ATen's DistributionTemplates.h
    to[i] = Threshold<Wide<T>>(p_in)(w) ? T(1) : T(0);
  });
  return out;
}

void bernoulli(ThreefryKey key, torch::jit::Stack& stack) {
  const auto p = stack[0].toTensor();
  at::Tensor out;
  with_float(p.scalar_type(), [&](auto type) { out = bernoulli_of<decltype(type)>(key, p); });
  stack = {out};
}

void native_dropout(ThreefryKey key, torch::jit::Stack& stack) {
  const auto x = stack[0].toTensor();
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  auto out = at::empty_like(x);
  with_float(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const W keep = W(1) - static_cast<W>(stack[1].toDouble()), scale = W(1) / keep;
    const Threshold<W> below(keep);
    const auto given = x.contiguous();
    auto kept = at::empty(x.sizes(), mask.options());
    auto scaled = at::empty(x.sizes(), x.options());
    const T* from = given.const_data_ptr<T>();
    bool* k = kept.mutable_data_ptr<bool>();
    T* to = scaled.mutable_data_ptr<T>();
    each_element(key, x.numel(), [&](int64_t i, Words w) {
      k[i] = below(w);
      to[i] = k[i] ? static_cast<T>(static_cast<W>(from[i]) * scale) : T(0);
    });
    if (out.is_contiguous()) {
      out = scaled, mask = kept;
    } else {
      out.copy_(scaled), mask.copy_(kept);
    }
  });
  stack = {out, mask};
}

// Uniform in [0, count); 0 stands for 2^64.
uint64_t below(uint64_t count, Words w) {
  if ((count & (count - 1)) == 0) {
    const int bits = count ? 63 - __builtin_clzll(count) : 64;
    if (bits == 0) return 0;
    return bits <= 32 ? w.high >> (32 - bits) : bits64(w) >> (64 - bits);
  }
  if (count >> 32) return bits64(w) % count;
  const uint64_t carry = (w.low * count) >> 32;
  return (w.high * count + carry) >> 32;
}

template <typename F>
bool with_integer(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kLong: f(int64_t{}); return true;
    case at::kInt: f(int32_t{}); return true;
    case at::kShort: f(int16_t{}); return true;
    case at::kChar: f(int8_t{}); return true;
    case at::kByte: f(uint8_t{}); return true;
    default: return false;
  }
}

// Bounds [low, high) of a call of random_, where this takes it.
std::optional<std::pair<int64_t, int64_t>> range_of(c10::ArrayRef<c10::IValue> args) {
  std::optional<std::pair<int64_t, int64_t>> range;
  with_integer(args[0].toTensor().scalar_type(), [&](auto type) {
    using T = decltype(type);
    // A number past the dtype's last, such as 256 for uint8, is a bound that nothing reaches.
    constexpr int64_t least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
    int64_t low = 0, high = most;
    const size_t given = args.size() - 2;  // without self and generator
    if (given == 1) high = args[1].toInt();
    if (given == 2) low = args[1].toInt(), high = args[2].isNone() ? most : args[2].toInt();
    const bool is_open = given == 0 || (given == 2 && args[2].isNone());
    if (is_open && sizeof(T) == 8) return;
    if (is_open) ++high;
    if (low < high && low >= least && high - 1 <= most) range = {low, high};
  });
  return range;
}

void random_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  const auto [low, high] = *range_of(stack);
  const auto first = static_cast<uint64_t>(low), count = static_cast<uint64_t>(high) - first;
  with_integer(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    fill<T>(out, key, [=](Words w) { return static_cast<T>(below(count, w) + first); });
  });
}

// As ATen's Distributions.cpp, which raises for more.
constexpr int64_t kMostCategories = int64_t{1} << 24;

bool takes_multinomial(c10::ArrayRef<c10::IValue> args) {
  const auto& p = args[0].toTensor();
  const auto samples = args[1].toInt();
  const bool replaces = args[2].toBool();
  return (p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble) && p.dim() >= 1 &&
      p.dim() <= 2 && p.size(-1) > 0 && p.size(-1) <= kMostCategories && samples >= 1 &&
      samples <= p.size(-1) && (!replaces || samples == 1);
}

// The largest of p / e, with e exponential.
void multinomial(ThreefryKey key, torch::jit::Stack& stack) {
  const auto p = stack[0].toTensor();
  if (p.numel()) {  // as ATen's Distributions.cpp
    const auto is_valid = p.max().item<double>() < INFINITY && p.min().item<double>() >= 0;
    TORCH_CHECK(is_valid, "probability tensor contains either `inf`, `nan` or element < 0");
    TORCH_CHECK(
        !(p.sum(-1) == 0).any().item<bool>(),
        "invalid multinomial distribution (sum of probabilities <= 0)");
  }
  auto race = at::empty(p.sizes(), p.options());
  with_float(p.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    constexpr W least = std::numeric_limits<W>::epsilon() / 2;
    fill<T>(race, key, [=](Words w) {
      return static_cast<T>(std::max(-std::log(open_uniform<W>(w)), least));
    });
  });
  race = p / race;
  const auto samples = stack[1].toInt();
  if (samples == 1) stack = {race.argmax(-1, true)};
  else stack = {std::get<1>(race.topk(samples))};
}

const std::unordered_map<std::string, Draw> kDraws{
    {"aten::uniform_", {takes_real, uniform_}},
    {"aten::normal_", {takes_real, normal_}},
    {"aten::normal.Tensor_Tensor", {takes_normal, normal}},
    {"aten::normal.Tensor_float", {takes_normal, normal}},
    {"aten::normal.float_Tensor", {takes_normal, normal}},
    {"aten::exponential_", {takes_real, exponential_}},
    {"aten::bernoulli_.float", {takes_real, bernoulli_float}},
    {"aten::bernoulli", {takes_real, bernoulli}},
    {"aten::native_dropout",
     {[](c10::ArrayRef<c10::IValue> args) {
        return takes_real(args) && (args[2].isNone() || args[2].toBool());
      },
      native_dropout}},
    {"aten::random_", {[](auto args) { return range_of(args).has_value(); }, random_}},
    {"aten::random_.to", {[](auto args) { return range_of(args).has_value(); }, random_}},
    {"aten::random_.from", {[](auto args) { return range_of(args).has_value(); }, random_}},
    {"aten::multinomial", {takes_multinomial, multinomial}},
};

bool is_in_bounds(const OpDescription& d, c10::ArrayRef<c10::IValue> args) {
  for (const auto& b : d.bounds) {
    if (args[b.argument].isNone()) continue;
    const auto x = args[b.argument].toScalar().toDouble();
    const auto most =
        b.other < 0 || args[b.other].isNone() ? b.most : args[b.other].toScalar().toDouble();
    if (!(x >= b.least && x <= most)) return false;
  }
  return true;
}

}  // namespace

HostFunction host_draw(const OpDescription& d, const c10::IValue* args) {
  const auto found = kDraws.find(d.name);
  if (found == kDraws.end()) return nullptr;
  const c10::ArrayRef<c10::IValue> given(args, d.policies.size());
  const bool draws = d.chance < 0 || args[d.chance].toDouble() != 0;
  return draws && is_in_bounds(d, given) && found->second.takes(given) ? found->second.run
                                                                       : nullptr;
}

}  // namespace tpu

// Random ops of the host tier. PyTorch's CPU kernels draw from another generator; these give the numbers
// that programs give, from the same seed and offset (`tpu_core.lowering.random`, `random_integers`).
#include "execution/host_ops.h"

#include "execution/draws.h"
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
  const auto mean = stack[1].toDouble(), std = stack[2].toDouble();
  fill_real(stack, key, [=](auto type) {
    using W = decltype(type);
    return [=](Words w) {
      return standard_normal(w, W{}) * static_cast<W>(std) + static_cast<W>(mean);
    };
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
  const auto rate = stack[1].toDouble();
  fill_real(stack, key, [=](auto type) {
    using W = decltype(type);
    return [=](Words w) { return exponential_of<W>(w) / static_cast<W>(rate); };
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
    if (is_open && sizeof(T) == 8) {  // one past the last is the least
      if (given == 0) range = {0, least};
      return;
    }
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
      (replaces || samples <= p.size(-1));
}

// The inverse of the cumulative distribution of each row.
void multinomial_with_replacement(ThreefryKey key, torch::jit::Stack& stack) {
  const auto p = stack[0].toTensor();
  const auto samples = stack[1].toInt(), count = p.size(-1);
  const auto rows = p.dim() == 2 ? p.size(0) : 1;
  auto sizes = p.sizes().vec();
  sizes.back() = samples;
  auto out = at::empty(sizes, at::kLong);
  with_float(p.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto given = p.contiguous();
    const T* from = given.template const_data_ptr<T>();
    std::vector<W> steps(static_cast<size_t>(rows * count));
    for (int64_t row = 0; row < rows; ++row) {
      W sum = 0;
      for (int64_t i = row * count; i < (row + 1) * count;
           ++i) {  // as ATen's MultinomialKernel.cpp
        const auto x = static_cast<W>(from[i]);
        TORCH_CHECK(
            x >= 0, "invalid multinomial distribution (encountering probability entry < 0)");
        TORCH_CHECK(
            std::isfinite(x),
            "invalid multinomial distribution (encountering probability entry = infinity or NaN)");
        steps[static_cast<size_t>(i)] = sum += x;
      }
      TORCH_CHECK(sum > 0, "invalid multinomial distribution (sum of probabilities <= 0)");
    }
    auto* to = out.mutable_data_ptr<int64_t>();
    each_element(key, rows * samples, [&](int64_t i, Words w) {
      const auto first = steps.begin() + i / samples * count, last = first + count;
      const W total = *(last - 1);
      // Strictly below the total, else the draw would be past the last probable element.
      const W level = std::min(uniform01<W>(w) * total, std::nextafter(total, W(0)));
      to[i] = std::min(std::upper_bound(first, last, level) - first, count - 1);
    });
  });
  stack = {out};
}

// The largest of p / e, with e exponential.
void multinomial(ThreefryKey key, torch::jit::Stack& stack) {
  if (stack[2].toBool() && stack[1].toInt() > 1) return multinomial_with_replacement(key, stack);
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
    fill<T>(race, key, [](Words w) { return exponential_of<W>(w); });
  });
  race = p / race;
  const auto samples = stack[1].toInt();
  if (samples == 1) stack = {race.argmax(-1, true)};
  else stack = {std::get<1>(race.topk(samples))};
}

const Draws kDraws{
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
  const auto& table = kDraws.count(d.name) ? kDraws : distribution_draws();
  const auto found = table.find(d.name);
  if (found == table.end()) return nullptr;
  const c10::ArrayRef<c10::IValue> given(args, d.policies.size());
  const bool draws = d.chance < 0 || args[d.chance].toDouble() != 0;
  return draws && is_in_bounds(d, given) && found->second.takes(given) ? found->second.run
                                                                       : nullptr;
}

}  // namespace tpu

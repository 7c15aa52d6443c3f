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

void fill_uniform(const at::Tensor& out, ThreefryKey key, double from, double to) {
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto low = static_cast<Wide<T>>(from), high = static_cast<Wide<T>>(to);
    fill<T>(out, key, [=](Words w) {
      const T value = static_cast<T>(static_cast<Wide<T>>(uniform01<T>(w)) * (high - low) + low);
      return value == static_cast<T>(high) ? static_cast<T>(low) : value;
    });
  });
}

void uniform_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  const auto low = stack[1].toDouble(), high = stack[2].toDouble();
  const auto fill_part = [=](const at::Tensor& part, ThreefryKey own, bool) {
    fill_uniform(part, own, low, high);
  };
  if (!each_part(out, key, fill_part)) fill_uniform(out, key, low, high);
}

void fill_normal(
    const at::Tensor& out, ThreefryKey key, double mean, double std, double share = 1) {
  with_float(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto middle = static_cast<W>(mean), scale = static_cast<W>(std) * static_cast<W>(share);
    fill<T>(out, key, [=](Words w) { return standard_normal(w, W{}) * scale + middle; });
  });
}

void normal_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor();
  const auto mean = stack[1].toDouble(), std = stack[2].toDouble();
  // Of a complex number the mean is real, and each part has half of the variance.
  const auto fill_part = [=](const at::Tensor& part, ThreefryKey own, bool is_real) {
    fill_normal(part, own, is_real ? mean : 0, std, std::sqrt(0.5));
  };
  if (!each_part(out, key, fill_part)) fill_normal(out, key, mean, std);
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
  with_real(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    fill<T>(out, key, [=](Words w) { return below(w) ? T(1) : T(0); });
  });
}

// 1 where an element of `p`, compared as W, says so.
template <typename W>
void fill_by_chances(const at::Tensor& out, ThreefryKey key, const at::Tensor& p) {
  const auto given = p.to(c10::CppTypeToScalarType<W>::value).expand(out.sizes()).contiguous();
  const W* chance = given.template const_data_ptr<W>();
  auto drawn = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  with_real(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* to = drawn.template mutable_data_ptr<T>();
    each_element(key, out.numel(), [&](int64_t i, Words w) {
      const W p_in = chance[i];
      TORCH_CHECK(p_in >= 0 && p_in <= 1);  // the text is that of ATen's DistributionTemplates.h
      to[i] = Threshold<W>(p_in)(w) ? T(1) : T(0);
    });
  });
  if (!out.is_contiguous()) out.copy_(drawn);
}

void bernoulli_tensor(ThreefryKey key, torch::jit::Stack& stack) {
  const auto out = stack[0].toTensor(), p = stack[1].toTensor();
  const bool is_wide = p.scalar_type() == at::kDouble && p.dim();
  if (is_wide) fill_by_chances<double>(out, key, p);
  else fill_by_chances<float>(out, key, p);
}

void bernoulli(ThreefryKey key, torch::jit::Stack& stack) {
  const auto p = stack[0].toTensor();
  const auto out = at::empty(p.sizes(), p.options());
  with_float(
      p.scalar_type(), [&](auto type) { fill_by_chances<Wide<decltype(type)>>(out, key, p); });
  stack = {out};
}

bool takes_chances(c10::ArrayRef<c10::IValue> args) {
  const auto out = args[0].toTensor(), p = args[1].toTensor();
  return with_real(out.scalar_type(), [](auto) {}) && is_real(p.scalar_type()) &&
      at::is_expandable_to(p.sizes(), out.sizes());
}

bool takes_any_real(c10::ArrayRef<c10::IValue> args) {
  return with_real(args[0].toTensor().scalar_type(), [](auto) {});
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

void rrelu_with_noise(ThreefryKey key, torch::jit::Stack& stack) {
  const auto x = stack[0].toTensor(), noise = stack[1].toTensor();
  if (!stack[4].toBool()) {  // it draws nothing
    const auto slope = (stack[2].toScalar().toDouble() + stack[3].toScalar().toDouble()) / 2;
    stack = {at::leaky_relu(x.contiguous(), slope)};
    return;
  }
  auto out = at::empty(x.sizes(), x.options());
  auto slopes = at::empty(x.sizes(), x.options());
  with_float(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto low = stack[2].toScalar().to<W>(), high = stack[3].toScalar().to<W>();
    const auto given = x.contiguous();
    const T* from = given.template const_data_ptr<T>();
    T *to = out.template mutable_data_ptr<T>(), *slope = slopes.template mutable_data_ptr<T>();
    each_element(key, x.numel(), [&](int64_t i, Words w) {
      const auto value = static_cast<W>(from[i]);
      const W factor = value <= 0 ? low + (high - low) * uniform01<W>(w) : W(1);
      to[i] = static_cast<T>(value * factor), slope[i] = static_cast<T>(factor);
    });
  });
  noise.copy_(slopes);
  stack = {out};
}

void rrelu_with_noise_(ThreefryKey key, torch::jit::Stack& stack) {
  const auto x = stack[0].toTensor();
  rrelu_with_noise(key, stack);
  stack = {x.copy_(stack[0].toTensor())};
}

bool takes_rrelu(c10::ArrayRef<c10::IValue> args) {
  const auto x = args[0].toTensor(), noise = args[1].toTensor();
  return takes_real(args) && noise.sizes() == x.sizes() && noise.scalar_type() == x.scalar_type();
}

const Draws kDraws{
    {"aten::uniform_", {takes_real_or_complex, uniform_}},
    {"aten::normal_", {takes_real_or_complex, normal_}},
    {"aten::normal.Tensor_Tensor", {takes_normal, normal}},
    {"aten::normal.Tensor_float", {takes_normal, normal}},
    {"aten::normal.float_Tensor", {takes_normal, normal}},
    {"aten::exponential_", {takes_real, exponential_}},
    {"aten::bernoulli_.float", {takes_any_real, bernoulli_float}},
    {"aten::bernoulli_.Tensor", {takes_chances, bernoulli_tensor}},
    {"aten::bernoulli", {takes_real, bernoulli}},
    {"aten::native_dropout",
     {[](c10::ArrayRef<c10::IValue> args) {
        return takes_real(args) && (args[2].isNone() || args[2].toBool());
      },
      native_dropout}},
    {"aten::rrelu_with_noise", {takes_rrelu, rrelu_with_noise}},
    {"aten::rrelu_with_noise_", {takes_rrelu, rrelu_with_noise_}},
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
  const c10::ArrayRef<c10::IValue> given(args, d.policies.size());
  if (!is_in_bounds(d, given)) return nullptr;
  for (const auto* table : {&kDraws, &integer_draws(), &distribution_draws()}) {
    const auto found = table->find(d.name);
    if (found != table->end()) return found->second.takes(given) ? found->second.run : nullptr;
  }
  return nullptr;
}

}  // namespace tpu

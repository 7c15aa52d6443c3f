// Named distributions and permutations of the host tier: the numbers that programs draw
// (`tpu_core.lowering.distributions`, `random_integers`) but for rounding. Each element rejects by itself.
#include "execution/draws.h"

#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using torch::jit::Stack;

// Rounds until a sampler gives up: parameters that are NaN accept nothing.
constexpr uint32_t kMostRounds = 200;

Words words_of(ThreefryKey key, int64_t i) {
  const auto index = static_cast<uint64_t>(i);
  return threefry2x32(key, static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(index));
}

// Two numbers in (0, 1] for an element.
template <typename W>
std::pair<W, W> uniform_pair(ThreefryKey key, int64_t i) {
  if constexpr (std::is_same_v<W, double>) {
    return {
        open_uniform<W>(words_of(fold_in(key, 0), i)),
        open_uniform<W>(words_of(fold_in(key, 1), i))};
  } else {
    const auto w = words_of(key, i);
    return {open_uniform<W>(w), (static_cast<W>(w.low) + W(0.5)) * W(0x1p-32)};
  }
}

// Calls round(key) until it returns true.
template <typename F>
void until_accepted(ThreefryKey key, F round) {
  for (uint32_t t = 0; t < kMostRounds; ++t)
    if (round(fold_in(key, t))) return;
}

// The tensor that f(value, index) makes of each element.
template <typename T, typename F>
at::Tensor each_of(const at::Tensor& x, F f) {
  auto out = at::empty(x.sizes(), x.options());
  const auto given = x.contiguous();
  const T* from = given.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  at::parallel_for(0, x.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = f(static_cast<Wide<T>>(from[i]), i);
  });
  return out;
}

void geometric_(ThreefryKey key, Stack& stack) {
  fill_real(stack, key, [&](auto type) {
    using W = decltype(type);
    const W rate = -std::log1p(-static_cast<W>(stack[1].toDouble()));
    return [=](Words w) { return std::max(std::ceil(exponential_of<W>(w) / rate), W(1)); };
  });
}

void cauchy_(ThreefryKey key, Stack& stack) {
  const auto median = stack[1].toDouble(), sigma = stack[2].toDouble();
  fill_real(stack, key, [=](auto type) {
    using W = decltype(type);
    return [=](Words w) {
      const W half = (static_cast<W>(w.high) + W(0.5)) * static_cast<W>(M_PI * 0x1p-33);
      const W draw = W(1) / std::tan(half);
      return static_cast<W>(median) + static_cast<W>(sigma) * (w.low & 1 ? -draw : draw);
    };
  });
}

void log_normal_(ThreefryKey key, Stack& stack) {
  const auto mean = stack[1].toDouble(), std = stack[2].toDouble();
  fill_real(stack, key, [=](auto type) {
    using W = decltype(type);
    return [=](Words w) {
      return std::exp(standard_normal(w, W{}) * static_cast<W>(std) + static_cast<W>(mean));
    };
  });
}

// Log probability by Stirling's series.
template <typename W>
W poisson_log_pmf(W k, W mean) {
  if (k < 1) return -mean;
  const W x = (mean - k) / k;
  const W log_pmf = k * (std::log1p(x) - x) - W(0.5) * std::log(W(2 * M_PI) * k);
  return log_pmf - (W(1.0 / 12) - 1 / (360 * k * k)) / k;
}

// Knuth's product of uniforms below a mean of 10, Hoermann's PTRS from there on.
template <typename W>
W poisson_of(ThreefryKey key, W mean, int64_t i) {
  const bool is_large = mean >= 10;
  const W rate = is_large ? mean : 10;
  const W b = W(0.931) + W(2.53) * std::sqrt(rate), a = W(-0.059) + W(0.02483) * b;
  const W log_inverse_alpha = std::log(W(1.1239) + W(1.1328) / (b - W(3.4)));
  const W v_r = W(0.9277) - W(3.6224) / (b - 2);
  W count = 0, log_product = 0;
  until_accepted(key, [&](ThreefryKey round) {
    const auto [first, second] = uniform_pair<W>(round, i);
    if (!is_large) {
      log_product += std::log(first);
      if (log_product <= -mean) return true;
      ++count;
      return false;
    }
    const W u = first - W(0.5);
    const W us = std::max(W(0.5) - std::abs(u), std::numeric_limits<W>::min());
    count = std::floor((2 * a / us + b) * u + rate + W(0.43));
    if (us >= W(0.07) && second <= v_r) return true;
    if (count < 0 || (us < W(0.013) && second > us)) return false;
    const W bound = std::log(second) + log_inverse_alpha - std::log(a / (us * us) + b);
    return bound <= poisson_log_pmf(count, rate);
  });
  return count;
}

void poisson(ThreefryKey key, Stack& stack) {
  const auto x = stack[0].toTensor();
  with_float(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    stack = {each_of<T>(x, [=](Wide<T> mean, int64_t i) {
      TORCH_CHECK(mean >= 0, "invalid Poisson rate, expected rate to be non-negative");
      return static_cast<T>(poisson_of(key, mean, i));
    })};
  });
}

// Logarithm of a standard gamma draw (Marsaglia and Tsang, 2000), which never underflows.
template <typename W>
W log_gamma_of(ThreefryKey key, W alpha, int64_t i) {
  const W d = (alpha < 1 ? alpha + 1 : alpha) - W(1.0 / 3), c = 1 / std::sqrt(9 * d);
  W log_v = 0;
  until_accepted(fold_in(key, 0), [&](ThreefryKey round) {
    const W x = standard_normal(words_of(fold_in(round, 0), i), W{});
    const W u = open_uniform<W>(words_of(fold_in(round, 1), i));
    const W root = 1 + c * x, v = root * root * root;
    log_v = 3 * std::log(std::max(root, std::numeric_limits<W>::min()));
    return root > 0 && std::log(u) < W(0.5) * x * x + d * (1 - v + log_v);
  });
  // A draw for alpha + 1 times u^(1 / alpha) is one for alpha.
  const W rest = alpha < 1 ? std::log(open_uniform<W>(words_of(fold_in(key, 1), i))) / alpha : 0;
  return std::log(d) + log_v + rest;
}

void standard_gamma(ThreefryKey key, Stack& stack) {
  const auto x = stack[0].toTensor();
  with_float(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T least = std::numeric_limits<T>::min();
    stack = {each_of<T>(x, [=](Wide<T> alpha, int64_t i) {
      const T draw = static_cast<T>(std::exp(log_gamma_of(key, alpha, i)));
      return draw < least ? least : draw;
    })};
  });
}

void sample_dirichlet(ThreefryKey key, Stack& stack) {
  const auto x = stack[0].toTensor();
  with_float(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto alphas = x.to(c10::CppTypeToScalarType<W>::value);
    const auto logs =
        each_of<W>(alphas, [=](W alpha, int64_t i) { return log_gamma_of(key, alpha, i); });
    const auto low = static_cast<double>(std::numeric_limits<T>::min());
    const auto high = 1 - static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
    stack = {at::softmax(logs, -1).to(x.scalar_type()).clamp_(low, high)};
  });
}

template <typename W>
W stirling_tail(W k) {
  const W inverse = 1 / (k + 1), square = inverse * inverse;
  return (W(1.0 / 12) - (W(1.0 / 360) - square / 1260) * square) * inverse;
}

// Sums of geometric waits where fewer than 10 successes are expected, else Hoermann's BTRS.
template <typename W>
W binomial_of(ThreefryKey key, W n, W prob, int64_t i) {
  const bool is_flipped = prob > W(0.5);
  const W p = is_flipped ? 1 - prob : prob;
  const bool is_large = n * p >= 10;
  const W n_safe = is_large ? n : 40, p_safe = is_large ? p : W(0.5);
  const W deviation = std::sqrt(n_safe * p_safe * (1 - p_safe));
  const W b = W(1.15) + W(2.53) * deviation, a = W(-0.0873) + W(0.0248) * b + W(0.01) * p_safe;
  const W v_r = W(0.92) - W(4.2) / b, ratio = p_safe / (1 - p_safe);
  const W alpha = (W(2.83) + W(5.1) / b) * deviation, mode = std::floor((n_safe + 1) * p_safe);
  const W log_failure = std::log1p(-p);
  W successes = 0, trials = 0;
  until_accepted(key, [&](ThreefryKey round) {
    const auto [first, second] = uniform_pair<W>(round, i);
    if (!is_large) {
      // A wait of at least one trial; without successes it is infinite.
      const W wait = std::max(std::ceil(std::log(first) / log_failure), W(1));
      trials += p > 0 ? wait : std::numeric_limits<W>::infinity();
      if (trials > n) return true;
      ++successes;
      return false;
    }
    const W u = first - W(0.5);
    const W us = std::max(W(0.5) - std::abs(u), std::numeric_limits<W>::min());
    const W k = std::floor((2 * a / us + b) * u + n_safe * p_safe + W(0.5));
    successes = k;
    if (us >= W(0.07) && second <= v_r) return true;
    if (k < 0 || k > n_safe) return false;
    const W bound = (mode + W(0.5)) * std::log((mode + 1) / (ratio * (n_safe - mode + 1))) +
        (n_safe + 1) * std::log1p((k - mode) / (n_safe - k + 1)) +
        (k + W(0.5)) * std::log(ratio * (n_safe - k + 1) / (k + 1)) + stirling_tail(mode) +
        stirling_tail(n_safe - mode) - stirling_tail(k) - stirling_tail(n_safe - k);
    return std::log(second * alpha / (a / (us * us) + b)) <= bound;
  });
  return is_flipped ? n - successes : successes;
}

bool takes_binomial(c10::ArrayRef<c10::IValue> args) {
  const auto &count = args[0].toTensor(), &prob = args[1].toTensor();
  return is_real(count.scalar_type()) && count.scalar_type() == prob.scalar_type() &&
      count.sizes() == prob.sizes();
}

void binomial(ThreefryKey key, Stack& stack) {
  const auto count = stack[0].toTensor(), prob = stack[1].toTensor();
  with_float(count.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto chances = prob.contiguous();
    const T* chance = chances.template const_data_ptr<T>();
    stack = {each_of<T>(count, [=](Wide<T> n, int64_t i) {
      return static_cast<T>(binomial_of(key, n, static_cast<Wide<T>>(chance[i]), i));
    })};
  });
}

bool takes_randperm(c10::ArrayRef<c10::IValue> args) {
  const auto n = args[0].toInt();
  const auto& out = args.back().toTensor();
  return n >= 0 && n < std::numeric_limits<int32_t>::max() && out.dim() == 1 && out.numel() == n &&
      at::isIntegralType(out.scalar_type(), false) && c10::elementSize(out.scalar_type()) >= 4;
}

// The order of 64 random bits an element.
void randperm(ThreefryKey key, Stack& stack) {
  const auto n = stack[0].toInt();
  std::vector<std::pair<uint64_t, int64_t>> order(static_cast<size_t>(n));
  each_element(key, n, [&](int64_t i, Words w) { order[static_cast<size_t>(i)] = {bits64(w), i}; });
  std::sort(order.begin(), order.end());
  auto places = at::empty({n}, at::kLong);
  auto* to = places.mutable_data_ptr<int64_t>();
  for (const auto& [bits, place] : order) *to++ = place;
  auto out = stack.back().toTensor();
  out.copy_(places);
  stack = {out};
}

}  // namespace

const Draws& distribution_draws() {
  static const Draws draws{
      {"aten::geometric_", {takes_real, geometric_}},
      {"aten::cauchy_", {takes_real, cauchy_}},
      {"aten::log_normal_", {takes_real, log_normal_}},
      {"aten::poisson", {takes_real, poisson}},
      {"aten::_standard_gamma", {takes_real, standard_gamma}},
      {"aten::_sample_dirichlet", {takes_real, sample_dirichlet}},
      {"aten::binomial", {takes_binomial, binomial}},
      {"aten::randperm.out", {takes_randperm, randperm}},
      {"aten::randperm.generator_out", {takes_randperm, randperm}},
  };
  return draws;
}

}  // namespace tpu

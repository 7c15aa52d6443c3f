// Random integers and samples of categories in the host tier: the numbers that programs draw
// (`tpu_core.lowering.random_integers`).
#include "execution/draws.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace tpu {
namespace {

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

// Least and greatest of the whole numbers that a dtype holds without gaps.
template <typename T>
constexpr std::pair<int64_t, int64_t> whole_numbers() {
  if constexpr (std::is_integral_v<T>)
    return {std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
  else return {-(int64_t{1} << digits_of<T>()), int64_t{1} << digits_of<T>()};
}

// From the first to one past the last.
struct Range {
  int64_t low, high;
};
using Bound = std::optional<int64_t>;

// The numbers of a dtype that are drawn between bounds, where this takes them. Without an upper one
// the greatest is drawn too.
std::optional<Range> range_of(at::ScalarType dtype, Bound low, Bound high) {
  std::optional<Range> range;
  with_real(dtype, [&](auto type) {
    using T = decltype(type);
    // A number past the dtype's last, such as 256 for uint8, is a bound that nothing reaches.
    constexpr auto least = whole_numbers<T>().first, most = whole_numbers<T>().second;
    if (!high && most == std::numeric_limits<int64_t>::max()) {
      if (!low) range = {0, std::numeric_limits<int64_t>::min()};  // one past the last is the least
      return;
    }
    const Range wanted{low.value_or(0), high ? *high : most + 1};
    if (wanted.low < wanted.high && wanted.low >= least && wanted.high - 1 <= most) range = wanted;
  });
  return range;
}

void fill_range(const at::Tensor& out, ThreefryKey key, Range range) {
  const auto first = static_cast<uint64_t>(range.low);
  const auto count = static_cast<uint64_t>(range.high) - first;
  with_real(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    fill<T>(out, key, [=](Words w) {
      return static_cast<T>(static_cast<int64_t>(below(count, w) + first));
    });
  });
}

Bound bound(const c10::IValue& v) { return v.isNone() ? Bound() : v.toInt(); }

// Of random_(), random_(to) and random_(from, to).
std::optional<Range> range_of_random(c10::ArrayRef<c10::IValue> args) {
  const auto dtype = args[0].toTensor().scalar_type();
  const size_t given = args.size() - 2;  // without self and generator
  if (given == 2) return range_of(dtype, args[1].toInt(), bound(args[2]));
  return range_of(dtype, {}, given ? bound(args[1]) : Bound());
}

bool takes_random(c10::ArrayRef<c10::IValue> args) { return range_of_random(args).has_value(); }

void random_(ThreefryKey key, torch::jit::Stack& stack) {
  fill_range(stack[0].toTensor(), key, *range_of_random(stack));
}

// Of randint_like(self, high) and randint_like(self, low, high), whose last five arguments are the options.
constexpr size_t kOptions = 5;

at::ScalarType dtype_like(c10::ArrayRef<c10::IValue> args) {
  const auto& dtype = args[args.size() - kOptions];
  return dtype.isNone() ? args[0].toTensor().scalar_type() : dtype.toScalarType();
}

std::optional<Range> range_like(c10::ArrayRef<c10::IValue> args) {
  const size_t high = args.size() - kOptions - 1;
  return range_of(dtype_like(args), high == 2 ? args[1].toInt() : 0, args[high].toInt());
}

bool takes_like(c10::ArrayRef<c10::IValue> args) {
  // Another memory format than the operand's is left to a program.
  return args.back().isNone() && range_like(args).has_value();
}

void randint_like(ThreefryKey key, torch::jit::Stack& stack) {
  const auto like = stack[0].toTensor();
  const auto out = at::empty_like(like, like.options().dtype(dtype_like(stack)));
  fill_range(out, key, *range_like(stack));
  stack = {out};
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

}  // namespace

const Draws& integer_draws() {
  static const Draws draws{
      {"aten::random_", {takes_random, random_}},
      {"aten::random_.to", {takes_random, random_}},
      {"aten::random_.from", {takes_random, random_}},
      {"aten::randint_like", {takes_like, randint_like}},
      {"aten::randint_like.low_dtype", {takes_like, randint_like}},
      {"aten::multinomial", {takes_multinomial, multinomial}},
  };
  return draws;
}

}  // namespace tpu

#include "execution/small_pointwise.h"

#include <ATen/EmptyTensor.h>

#include <cmath>
#include <limits>
#include <optional>
#include <unordered_map>

namespace tpu {

// `number` computes with a number in place of the second operand.
struct SmallPointwise {
  using Loop =
      void (*)(float* out, const float* a, const float* b, const float* c, float s, int64_t n);
  Loop loop;
  size_t operands;  // tensors of an item
  bool has_number;  // an argument after them, one for all items or one for each
  bool is_in_place;
  Loop number = nullptr;  // the loop where the second operand is a number
  bool subtracts = false;
};

namespace {

// Above it ATen's own time is no more than the loop's.
constexpr int64_t kMostOfItem = 1 << 14;

#if defined(__x86_64__)
// -O2 vectorizes no loop of unknown length.
#define TPU_LOOP __attribute__((target("avx2,fma"), optimize("O3")))
bool has_loops() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define TPU_LOOP
bool has_loops() { return true; }
#endif

#define TPU_POINTWISE(name, expression)                                               \
  TPU_LOOP void name(                                                                 \
      float* out, [[maybe_unused]] const float* as, [[maybe_unused]] const float* bs, \
      [[maybe_unused]] const float* cs, [[maybe_unused]] float s, int64_t n) {        \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {                            \
      [[maybe_unused]] const float a = as[i], b = bs[i], c = cs[i];                   \
      out[i] = (expression);                                                          \
    }                                                                                 \
  }

// The formulas of ATen/native/cpu/{Binary,Unary,Pointwise}OpsKernel.cpp and LerpKernel.cpp, with a product and
// a sum rounded once where those are. Roots and transcendental functions are MKL's or SLEEF's there, whose last
// bit is another.
TPU_POINTWISE(add, __builtin_fmaf(b, s, a))
TPU_POINTWISE(add_number, a + s)
TPU_POINTWISE(multiply, a* b)
TPU_POINTWISE(multiply_number, a* s)
TPU_POINTWISE(divide, a / b)
TPU_POINTWISE(divide_number, a / s)
TPU_POINTWISE(lerp_small, __builtin_fmaf(s, b - a, a))
TPU_POINTWISE(lerp_large, __builtin_fmaf(s - 1, b - a, b))
TPU_POINTWISE(addcmul, __builtin_fmaf(s* b, c, a))
TPU_POINTWISE(addcdiv, a + s * b / c)
TPU_POINTWISE(square, a* a)
TPU_POINTWISE(negate, -a)
TPU_POINTWISE(reciprocal, 1.0f / a)
TPU_POINTWISE(relu, a < 0.0f ? 0.0f : a)
TPU_POINTWISE(threshold_backward, b <= s ? 0.0f : a)
TPU_POINTWISE(sigmoid_backward, a * (1.0f - b) * b)
TPU_POINTWISE(tanh_backward, a* __builtin_fmaf(-b, b, 1.0f))
#undef TPU_POINTWISE

void lerp(float* out, const float* a, const float* b, const float* c, float s, int64_t n) {
  (std::abs(s) < 0.5f ? lerp_small : lerp_large)(out, a, b, c, s, n);
}

using Table = std::unordered_map<std::string, SmallPointwise>;

Table make_table() {
  Table table;
  auto both = [&](const std::string& name, const std::string& overload, SmallPointwise op) {
    for (const bool is_in_place : {false, true}) {
      op.is_in_place = is_in_place;
      auto full = "aten::" + name;
      if (is_in_place) full += '_';
      if (!overload.empty()) full.append(1, '.').append(overload);
      table[full] = op;
    }
  };
  both("add", "Tensor", {add, 2, true, false, add_number});
  both("sub", "Tensor", {add, 2, true, false, add_number, true});
  both("mul", "Tensor", {multiply, 2, false, false, multiply_number});
  both("div", "Tensor", {divide, 2, false, false, divide_number});
  both("pow", "Tensor_Scalar", {square, 1, true, false});
  both("lerp", "Scalar", {lerp, 2, true, false});
  both("addcmul", "", {addcmul, 3, true, false});
  both("addcdiv", "", {addcdiv, 3, true, false});
  for (const auto& [name, loop] :
       std::initializer_list<std::pair<const char*, SmallPointwise::Loop>>{
           {"neg", negate}, {"reciprocal", reciprocal}, {"relu", relu}}) {
    both(name, "", {loop, 1, false, false});
    if (loop != relu) both(std::string("_foreach_") + name, "", {loop, 1, false, false});
  }
  table["aten::threshold_backward"] = {threshold_backward, 2, true, false};
  table["aten::sigmoid_backward"] = {sigmoid_backward, 2, false, false};
  table["aten::tanh_backward"] = {tanh_backward, 2, false, false};
  for (const char* overload : {"Scalar", "ScalarList"}) {
    both("_foreach_add", overload, {add_number, 1, true, false});
    both("_foreach_sub", overload, {add_number, 1, true, false, nullptr, true});
    both("_foreach_mul", overload, {multiply_number, 1, true, false});
    both("_foreach_div", overload, {divide_number, 1, true, false});
    both("_foreach_addcmul", overload, {addcmul, 3, true, false});
    both("_foreach_addcdiv", overload, {addcdiv, 3, true, false});
    both("_foreach_lerp", overload, {lerp, 2, true, false});
  }
  both("_foreach_add", "List", {add, 2, true, false});
  both("_foreach_sub", "List", {add, 2, true, false, nullptr, true});
  both("_foreach_mul", "List", {multiply, 2, false, false});
  both("_foreach_div", "List", {divide, 2, false, false});
  return table;
}

// A number as ATen converts it; nothing for one that is no finite float32, or that ATen may refuse: a boolean,
// a complex number.
std::optional<float> number_of(const c10::IValue& v) {
  if (v.isInt()) return static_cast<float>(v.toInt());
  if (!v.isDouble()) return {};
  const double x = v.toDouble();
  if (std::isfinite(x) && std::abs(x) > std::numeric_limits<float>::max()) return {};
  return static_cast<float>(x);
}

std::optional<float> wrapped_number(const at::Tensor& t) {
  if (t.scalar_type() == at::kDouble) return number_of(*t.const_data_ptr<double>());
  if (t.scalar_type() == at::kLong) return number_of(*t.const_data_ptr<int64_t>());
  return {};
}

bool have_one_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A result as TensorIterator's fast setup lays it out: what is contiguous may have any strides where sizes are 1.
at::Tensor empty_as(const at::Tensor& a) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast})
    if (a.is_contiguous(format))
      return at::detail::empty_cpu(
          a.sizes(), at::kFloat, std::nullopt, std::nullopt, std::nullopt, format);
  return at::detail::empty_strided_cpu(a.sizes(), a.strides(), at::kFloat);
}

// Whether two tensors of n numbers share some memory and not all of it.
bool overlap(const at::Tensor& a, const at::Tensor& b, int64_t n) {
  const auto *p = a.const_data_ptr<float>(), *q = b.const_data_ptr<float>();
  return p != q && p < q + n && q < p + n;
}

}  // namespace

const SmallPointwise* small_pointwise(const std::string& name) {
  static const Table table = has_loops() ? make_table() : Table{};
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

bool compute(
    const SmallPointwise& op, const c10::IValue* args, c10::ArrayRef<at::Tensor> operands,
    SmallResults& made) {
  const bool is_list = args[0].isTensorList();
  const size_t items = is_list ? args[0].toListRef().size() : 1;
  size_t count = op.operands;
  auto loop = op.loop;
  std::optional<float> second;
  if (op.number && operands.size() == 1) {
    if (args[0].toTensor().is_cpu()) return false;
    second = wrapped_number(args[1].toTensor());
    if (!second) return false;
    loop = op.number;
    count = 1;
  }
  if (operands.size() != items * count) return false;
  for (size_t i = 0; i < items; ++i) {
    const auto& a = operands[i];
    const auto n = a.numel();
    if (a.scalar_type() != at::kFloat || n > kMostOfItem || !a.is_non_overlapping_and_dense())
      return false;
    for (size_t j = 1; j < count; ++j) {
      const auto& b = operands[j * items + i];
      if (!have_one_geometry(a, b) || (op.is_in_place && overlap(a, b, n))) return false;
    }
  }
  const auto* number = op.has_number ? &args[op.operands] : nullptr;
  const bool is_each = number && number->isList();
  if (is_each && number->toListRef().size() != items) return false;
  c10::SmallVector<float, 16> numbers;
  for (size_t i = 0; i < (is_each ? items : 1); ++i) {
    auto s = number ? number_of(is_each ? number->toListRef()[i] : *number) : std::optional(0.0f);
    if (!s) return false;
    if (loop == square && *s != 2.0f) return false;
    if (op.subtracts) s = -*s;
    if (second && number) {
      if (std::abs(*s) != 1.0f) return false;  // ATen rounds the product with the sum
      s = *s * *second;
    } else if (second) {
      s = second;
    }
    numbers.push_back(*s);
  }
  for (size_t i = 0; i < items; ++i) {
    const auto& a = operands[i];
    at::Tensor fresh;
    if (!op.is_in_place) fresh = empty_as(a);
    auto* out = (op.is_in_place ? a : fresh).mutable_data_ptr<float>();
    const float* in[3];
    for (size_t j = 0; j < 3; ++j)
      in[j] = operands[(j < count ? j : 0) * items + i].const_data_ptr<float>();
    loop(out, in[0], in[1], in[2], numbers[is_each ? i : 0], a.numel());
    if (!op.is_in_place) made.push_back(std::move(fresh));
  }
  return true;
}

}  // namespace tpu

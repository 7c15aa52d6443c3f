// Numbers of a call that are no part of its signature, where PyTorch may refuse them.
#include "recorder/call.h"

#include <c10/util/overflows.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tpu {
namespace {

template <typename Number>
bool overflows(at::ScalarType to, Number x) {
  switch (to) {
#define TPU_CASE(T, name) \
  case at::ScalarType::name: return c10::overflows<T, Number>(x);
    TPU_CASE(uint8_t, Byte)
    TPU_CASE(int8_t, Char)
    TPU_CASE(int16_t, Short)
    TPU_CASE(int32_t, Int)
    TPU_CASE(int64_t, Long)
    TPU_CASE(uint16_t, UInt16)
    TPU_CASE(uint32_t, UInt32)
    TPU_CASE(uint64_t, UInt64)
    TPU_CASE(at::Half, Half)
    TPU_CASE(at::BFloat16, BFloat16)
    TPU_CASE(float, Float)  // NOLINT(bugprone-branch-clone): a complex number's parts
    TPU_CASE(float, ComplexFloat)
#undef TPU_CASE
    default: return false;
  }
}

}  // namespace

bool window_fits(const c10::IValue* args, size_t n) {
  const auto grad = args[0].toTensor();
  auto sizes = args[1].toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  auto dim = args[2].toInt();
  if (dim < -rank || dim >= rank) return false;
  if (dim < 0) dim += rank;
  const auto size = sizes[dim];
  const auto clamped = [size](int64_t i, int64_t least) {
    return std::clamp(i < 0 ? i + size : i, least, size);
  };
  if (n == 4) {  // select_backward
    const auto index = args[3].toInt();
    sizes.erase(sizes.begin() + dim);
    return index >= -size && index < size && grad.sizes() == sizes;
  }
  const auto step = args[5].toInt();
  if (step <= 0) return false;
  const auto start = clamped(args[3].toInt(), 0), end = clamped(args[4].toInt(), start);
  sizes[dim] = (end - start + step - 1) / step;
  return grad.sizes() == sizes;
}

void hash_refusable(Call& c, const OpDescription& d, const c10::IValue* args) {
  for (size_t i = 0; i < c.numbers.size(); ++i) {
    const auto pack = c.packs[i];
    if (pack == Pack::I32) continue;  // starts of slices
    const bool whole = pack == Pack::I64;
    const auto integer = static_cast<int64_t>(c.numbers[i]);
    if (d.divides && whole)
      for (const auto& a : c.reads) {
        const auto to = a.tensor->scalar_type();
        // Of the number, the dtype's bits count: 256 is 0 in eight.
        const auto bits = 8 * c10::elementSize(to);
        const bool zero = bits < 64 ? !(integer & ((1ll << bits) - 1)) : !integer;
        if (zero && at::isIntegralType(to, true)) c.hasher.add(92);
      }
    double real;
    std::memcpy(&real, &c.numbers[i], 8);
    // Numbers up to 127 fit every dtype.
    if (whole ? integer >= -127 && integer <= 127 : std::abs(real) <= 127) continue;
    uint64_t mask = 0, bit = 1;
    auto check = [&](const Access& a) {
      const auto to = a.tensor->scalar_type();
      if (whole ? overflows(to, integer) : overflows(to, real)) mask |= bit;
      bit <<= 1;
    };
    for (const auto& a : c.reads) check(a);
    for (const auto& a : c.writes) check(a);
    if (!mask) continue;
    c.hasher.add(90);
    c.hasher.add(i);
    c.hasher.add(mask);
  }
  for (const auto& b : d.bounds) {
    if (args[b.argument].isNone()) continue;
    const auto x = args[b.argument].toScalar().toDouble();
    const auto most =
        b.other < 0 || args[b.other].isNone() ? b.most : args[b.other].toScalar().toDouble();
    if (x >= b.least && x <= most) continue;
    c.hasher.add(91);
    c.hasher.add(static_cast<uint64_t>(b.argument));
  }
}

}  // namespace tpu

#include "execution/threefry.h"

namespace tpu {
namespace {

constexpr uint32_t kParity = 0x1BD11BDA;
constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};

inline void rounds(ThreefryKey key, uint32_t& x, uint32_t& y) {
  const uint32_t schedule[3] = {key.low, key.high, key.low ^ key.high ^ kParity};
  x += key.low;
  y += key.high;
#pragma GCC unroll 5
  for (uint32_t block = 0; block < 5; ++block) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int bits = kRotations[block % 2][i];
      x += y;
      y = (y << bits) | (y >> (32 - bits));
      y ^= x;
    }
    x += schedule[(block + 1) % 3];
    y += schedule[(block + 2) % 3] + block + 1;
  }
}

}  // namespace

Words threefry2x32(ThreefryKey key, uint32_t x, uint32_t y) {
  rounds(key, x, y);
  return {x, y};
}

__attribute__((target_clones("avx2", "default"), optimize("O3"))) void threefry_block(
    ThreefryKey key, uint64_t first, uint32_t* high, uint32_t* low) {
  for (size_t i = 0; i < kThreefryBlock; ++i) {
    const uint64_t index = first + i;
    uint32_t x = static_cast<uint32_t>(index >> 32), y = static_cast<uint32_t>(index);
    rounds(key, x, y);
    high[i] = x;
    low[i] = y;
  }
}

ThreefryKey derive_key(uint64_t seed, uint64_t offset) {
  const ThreefryKey of_seed{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const auto words =
      threefry2x32(of_seed, static_cast<uint32_t>(offset >> 32), static_cast<uint32_t>(offset));
  return {words.high, words.low};
}

}  // namespace tpu

// The device's random bits on the host: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), a function
// of a call's key and an element's index, as of `tpu_core.lowering.random`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tpu {

struct ThreefryKey {
  uint32_t low, high;
};

struct Words {
  uint32_t high, low;
};

// Elements that are drawn at once.
constexpr size_t kThreefryBlock = 64;

Words threefry2x32(ThreefryKey key, uint32_t x, uint32_t y);
// The words of elements `first`, `first + 1`, ..., kThreefryBlock of them.
void threefry_block(ThreefryKey key, uint64_t first, uint32_t* high, uint32_t* low);
// The key of one call from a generator's seed and offset.
ThreefryKey derive_key(uint64_t seed, uint64_t offset);

}  // namespace tpu

// Device hooks, guard, generators, streams and events.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <utility>

namespace tpu {

constexpr uint64_t kDraw = 4;  // how far one random op moves the generator's offset

// Seed and offset for one random op, advancing the generator (the device's default if undefined).
std::pair<uint64_t, uint64_t> next_seed(const at::Generator& generator, int16_t device);
const at::Generator& default_generator(int16_t device);
void register_device();

}  // namespace tpu

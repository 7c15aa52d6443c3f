// A 128-bit hash of trivially copyable words, the same in every process: keys of executables on disk
// are made of it, so nothing that is hashed may be a pointer.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace tpu {

struct Hash128 {
  uint64_t lo = 0, hi = 0;
  bool operator==(const Hash128& o) const { return lo == o.lo && hi == o.hi; }
};

struct HashOfHash {
  size_t operator()(const Hash128& h) const { return h.lo; }
};

class Hasher {
 public:
  explicit Hasher(Hash128 seed = {0x9E3779B97F4A7C15ull, 0xD1B54A32D192ED03ull})
      : a_(seed.lo), b_(seed.hi) {}

  void add(uint64_t x) {
    a_ = multiply_fold(a_ ^ x, 0xA0761D6478BD642Full);
    b_ = multiply_fold(b_ + x, 0xE7037ED1A0B428DBull) ^ (a_ >> 29);
  }
  void add(const Hash128& h) {
    add(h.lo);
    add(h.hi);
  }
  template <typename Range>
  void add_range(const Range& values) {
    add(values.size());
    for (auto v : values) add(static_cast<uint64_t>(v));
  }
  void add_bytes(std::string_view s) {
    add(s.size());
    uint64_t word = 0;
    size_t i = 0;
    for (unsigned char c : s) {
      word = (word << 8) | c;
      if (++i % 8 == 0) add(word);
    }
    add(word);
  }
  Hash128 digest() const { return {a_ ^ (b_ << 1), b_ ^ (a_ >> 3)}; }

 private:
  // The product's halves folded together, as in wyhash (Wang Yi, 2019).
  static uint64_t multiply_fold(uint64_t x, uint64_t y) {
    __uint128_t p = static_cast<__uint128_t>(x) * y;
    return static_cast<uint64_t>(p) ^ static_cast<uint64_t>(p >> 64) ^ x;
  }
  uint64_t a_, b_;
};

}  // namespace tpu

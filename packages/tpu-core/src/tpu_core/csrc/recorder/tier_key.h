// The key of a call among the ops of a tiers' segment (tiering.h).
//
// Calls of one key have one signature, but for what hardly ever changes between rounds of a program: dtypes
// that are default, settings, operands that share a storage. So it costs a tenth of a signature's hash, which
// is computed only for what is recorded.
#pragma once

#include "recorder/record.h"
#include "values/value.h"

namespace tpu {

class TierKey {
 public:
  explicit TierKey(const OpDescription& d) : bits_(d.hash.lo) {}
  uint64_t value() const { return bits_; }

  void add(uint64_t x) {
    bits_ = (bits_ ^ x) * 0x9E3779B97F4A7C15ull;
    bits_ ^= bits_ >> 32;
  }
  // An operand that is its storage's value.
  void add_geometry(const at::Tensor& t) {
    add((static_cast<uint64_t>(t.scalar_type()) << 32) | static_cast<uint64_t>(t.dim()));
    for (const auto s : t.sizes()) add(static_cast<uint64_t>(s));
    if (!t.is_contiguous())
      for (const auto s : t.strides()) add(static_cast<uint64_t>(s));
  }
  // An operand on the device whose storage's value has that layout. Needs g_mutex.
  void add_operand(const at::Tensor& t, const Layout& l);
  // An operand of another device, which stands for a number.
  void add_host_operand(const at::Tensor& t) {
    add((static_cast<uint64_t>(t.scalar_type()) << 32) | (1ull << 63));
  }
  // An argument that is no tensor.
  void add_argument(const c10::IValue& v, bool is_compiled_in);

 private:
  uint64_t bits_;
};

// Calls f(tensor, argument) for each defined tensor among the arguments of a call, in order, those of lists
// too, until it returns false; adds the other arguments to the key. Whether f always returned true.
template <typename F>
bool each_operand(const OpDescription& d, const c10::IValue* args, TierKey& key, F f) {
  for (size_t i = 0; i < d.policies.size(); ++i) {
    const auto& v = args[i];
    switch (d.policies[i]) {
      case Policy::Tensor:
        if (v.isTensor() && v.toTensor().defined()) {
          if (!f(v.toTensor(), i)) return false;
        } else {
          key.add(20);
        }
        break;
      case Policy::TensorList:
        if (v.isNone()) {
          key.add(20);
          break;
        }
        key.add(v.toListRef().size());
        for (const c10::IValue& item : v.toListRef()) {
          if (item.isTensor() && item.toTensor().defined()) {
            if (!f(item.toTensor(), i)) return false;
          } else {
            key.add(20);
          }
        }
        break;
      case Policy::Drop:
      case Policy::Generator: break;
      default: key.add_argument(v, d.compiled_in[i] || d.policies[i] == Policy::Static);
    }
  }
  return true;
}

// The key of any call. Needs g_mutex; the types of its operands' values are settled.
uint64_t tier_key(const OpDescription& d, const c10::IValue* args);

}  // namespace tpu

#include "recorder/tier_key.h"

#include "runtime/locks.h"

#include <cstring>

namespace tpu {

void TierKey::add_argument(const c10::IValue& v, bool is_compiled_in) {
  if (v.isInt()) {
    add(42);
    if (is_compiled_in) add(static_cast<uint64_t>(v.toInt()));
  } else if (v.isDouble()) {
    add(43);
    const double x = v.toDouble();
    uint64_t word;
    std::memcpy(&word, &x, 8);
    if (is_compiled_in) add(word);
  } else if (v.isBool()) {
    add(44 + v.toBool());
  } else if (v.isList()) {
    add(v.toListRef().size());
    for (const c10::IValue& item : v.toListRef()) add_argument(item, is_compiled_in);
  } else if (v.isString()) {
    Hasher h;
    h.add_bytes(v.toStringRef());
    add(h.digest().lo);
  } else {
    add(46 + v.isNone());
  }
}

uint64_t tier_key(const OpDescription& d, const c10::IValue* args) {
  TPU_ASSERT_LOCKED();
  TierKey key(d);
  each_operand(d, args, key, [&](const at::Tensor& t, size_t) {
    if (t.is_privateuseone()) key.add_operand(t, cell_of(t)->value->layout);
    else key.add_host_operand(t);
    return true;
  });
  return key.value();
}

}  // namespace tpu

#include "recorder/call.h"

#include "recorder/checks.h"
#include "recorder/tensors.h"
#include "values/device.h"

#include <c10/core/DefaultDtype.h>

#include <array>
#include <atomic>
#include <cstring>

namespace tpu {
namespace {

thread_local int t_precision = -1;
// Of the process: a backward pass runs on other threads.
std::atomic<uint64_t> g_implementations{0};

// What `torch.set_float32_matmul_precision` and `torch.tpu.precision` say: part of a product's signature.
uint64_t matmul_precision() {
  if (t_precision >= 0) return static_cast<uint64_t>(t_precision);
  return static_cast<uint64_t>(at::globalContext().float32MatmulPrecision());
}

uint64_t bits_of(double d) {
  uint64_t b;
  std::memcpy(&b, &d, 8);
  return b;
}

void check_device(Call& c, const at::Tensor& t) {
  const auto index = static_cast<int16_t>(t.device().index());
  if (c.device < 0) c.device = index;
  TORCH_CHECK(
      c.device == index,
      "Expected all tensors to be on the same device, but found at least two devices, tpu:",
      c.device, " and tpu:", index, "!");
}

void wrong_device(const at::Tensor& t, int16_t device) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, tpu:",
      device < 0 ? current_device() : device, " and ", t.device().str(), "!");
}

bool overwrites(const at::Tensor& t, const Access& a) {
  if (a.form == Form::Whole) return true;
  return t.storage_offset() == 0 &&
      static_cast<size_t>(t.numel()) * t.element_size() == a.value->nbytes &&
      a.value->nbytes == t.storage().nbytes() && is_dense(t.sizes(), t.strides());
}

void hash_static(Hasher& h, const c10::IValue& v) {
  if (v.isNone()) {
    h.add(40);
  } else if (v.isBool()) {
    h.add(41);
    h.add(v.toBool());
  } else if (v.isInt()) {
    h.add(42);
    h.add(static_cast<uint64_t>(v.toInt()));
  } else if (v.isUnsigned()) {  // 2**63 and above
    h.add(52);
    h.add(v.toUInt());
  } else if (v.isDouble()) {
    h.add(43);
    h.add(bits_of(v.toDouble()));
  } else if (v.isComplexDouble()) {
    h.add(44);
    h.add(bits_of(v.toComplexDouble().real()));
    h.add(bits_of(v.toComplexDouble().imag()));
  } else if (v.isString()) {
    h.add(45);
    h.add_bytes(v.toStringRef());
  } else if (v.isDevice()) {
    h.add(46);
  } else if (v.isList()) {
    h.add(47);
    const auto list = v.toListRef();
    h.add(list.size());
    for (const auto& item : list) hash_static(h, item);
  } else if (v.isIntList()) {
    h.add(48);
    h.add_range(v.toIntVector());
  } else if (v.isStream() || v.isGenerator()) {
    h.add(49);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "tpu: an argument of type ", v.tagKind(), " cannot be recorded.");
  }
}

// Whether a call writes one element, or a part of a tensor. A flag or a count that is stored there
// varies, where 0 and 1 are constants of most other ops. `x[i] = 1` fills a tensor of one element.
bool writes_part(const Call& c) {
  if (c.writes.empty()) return false;
  const auto& t = *c.writes[0].tensor;
  const auto nbytes = static_cast<size_t>(t.numel()) * t.element_size();
  return t.numel() == 1 || nbytes < t.storage().nbytes();
}

void add_scalar(
    Call& c, const c10::IValue& v, bool compiled_in, bool steady = false, bool varies = false) {
  if (compiled_in || !(v.isInt() || v.isDouble())) {
    hash_static(c.hasher, v);
  } else if (v.isInt()) {
    c.hasher.add(50);
    const auto n = v.toInt();
    add_number(c, static_cast<uint64_t>(n), Pack::I64, steady || (!varies && (n == 0 || n == 1)));
  } else {
    c.hasher.add(51);
    const auto x = v.toDouble();
    // The pack is fixed once every operand was seen.
    add_number(c, bits_of(x), Pack::F32, steady || (!varies && (x == 0.0 || x == 1.0)));
  }
}

// Whether a list holds one number several times, as an optimizer's step sizes do: one number then
// serves all, and with it one kernel. `alike` in recorder/op_schema.py says the same.
bool all_alike(c10::ArrayRef<c10::IValue> list) {
  if (list.size() < 2 || !(list[0].isInt() || list[0].isDouble())) return false;
  for (const auto& item : list.slice(1)) {
    if (item.isInt() != list[0].isInt() || item.isDouble() != list[0].isDouble()) return false;
    if (item.isInt() ? item.toInt() != list[0].toInt()
                     : bits_of(item.toDouble()) != bits_of(list[0].toDouble()))
      return false;
  }
  return true;
}

// `item` is a call of the dispatcher.
template <typename T>
T element_of(const at::Tensor& t) {
  const bool has_memory = t.is_cpu() && !t._is_zerotensor();
  return has_memory ? *t.const_data_ptr<T>() : t.item<T>();
}

void add_tensor(Call& c, const OpDescription& d, const at::Tensor& t, bool written, bool in_list) {
  if (!t.defined()) {
    c.hasher.add(20);
    return;
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    // `x + 2`: a Python number that PyTorch wrapped in a tensor.
    c.hasher.add(24);
    const auto kind = t.scalar_type();
    const bool varies = d.fills && writes_part(c);
    // A tensor filled with True holds what it holds filled with 1.
    if (kind == at::kBool && d.fills) add_scalar(c, int64_t{t.item<bool>()}, false, false, varies);
    else if (kind == at::kDouble) add_scalar(c, element_of<double>(t), false, false, varies);
    else if (kind == at::kLong) add_scalar(c, element_of<int64_t>(t), false, false, varies);
    else if (kind == at::kBool) add_scalar(c, t.item<bool>(), false);
    else if (kind == at::kUInt64) add_scalar(c, c10::IValue(t.item()), false);
    else add_scalar(c, c10::IValue(t.item<c10::complex<double>>()), false);
    return;
  }
  const at::Tensor* operand = &t;
  if (!t.is_privateuseone()) {
    // `x[cpu_indices]` is fine, `cpu_tensor[indices]` is not.
    TORCH_CHECK(
        in_list || !d.host_operands || c.device >= 0,
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    if (!t.is_cpu() || written) wrong_device(t, c.device);
    const bool scalar = t.dim() == 0 && d.scalar_operands;
    if (scalar && !at::isComplexType(t.scalar_type())) {
      // Read now: a CPU scalar may be overwritten before the segment runs.
      c.hasher.add(21);
      c.hasher.add(static_cast<uint64_t>(t.scalar_type()));
      const auto kind = t.scalar_type();
      if (at::isFloatingType(kind)) {
        add_number(
            c, bits_of(t.item<double>()), kind == at::kDouble ? Pack::F64 : Pack::F32, false);
      } else if (at::isIntegralType(kind, false)) {
        add_number(c, static_cast<uint64_t>(t.item<int64_t>()), Pack::I64, false);
      } else if (kind == at::kBool) {
        add_number(c, static_cast<uint64_t>(t.item<bool>()), Pack::I64, false);
      } else {
        wrong_device(t, c.device);
      }
      return;
    }
    // No number travels as a complex one: such a scalar goes as a tensor.
    if (!scalar && !(in_list && d.host_operands)) wrong_device(t, c.device);
    c.moved.push_front(to_device(t, c.device < 0 ? current_device() : c.device));
    operand = &c.moved.front();
  }
  check_device(c, *operand);
  if (operand->scalar_type() == at::kDouble || operand->scalar_type() == at::kComplexDouble)
    c.wide = true;
  c.hasher.add(written ? 23 : 22);
  if (!(written && d.write_only)) {
    auto& read = c.reads.emplace_back();
    read.tensor = operand;
    resolve_access(c, read);
  }
  if (written) {
    Access write;
    write.tensor = operand;
    resolve_access(c, write);
    write.overwrites = overwrites(*operand, write);
    for (size_t k = 0; k < c.writes.size(); ++k) {
      auto& earlier = c.writes[k];
      if (earlier.cell != write.cell) continue;
      write.chained = static_cast<int>(k);
      // Each of them is described by the layout that the value had before the op.
      earlier.overwrites = earlier.form == Form::Whole;
      write.overwrites = write.form == Form::Whole;
    }
    c.hasher.add(static_cast<uint64_t>(write.chained) + 1);
    c.writes.push_back(std::move(write));
  }
}

}  // namespace

void gather(Call& c, const OpDescription& d, const c10::IValue* args, size_t n) {
  TPU_ASSERT_LOCKED();
  c.hasher.add(d.hash);
  // The dtype of what integers become: results have it, and lowerings compute in it.
  c.hasher.add(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
  if (d.jax_settings) c.hasher.add(c.jax_settings);
  if (d.precision) c.hasher.add(matmul_precision());
  if (d.checks) c.hasher.add(100 + static_cast<uint64_t>(checks()));
  if (const auto chosen = g_implementations.load(std::memory_order_relaxed)) c.hasher.add(chosen);
  // An integer tensor and 0.1 make 64-bit floats, too.
  c.wide = d.wide_numbers || c10::get_default_dtype_as_scalartype() == at::kDouble;
  for (size_t i = 0; i < n; ++i) {
    const auto& v = args[i];
    const bool written = d.writes[i];
    switch (d.policies[i]) {
      case Policy::Tensor:
        if (v.isNone()) c.hasher.add(20);
        else add_tensor(c, d, v.toTensor(), written, false);
        break;
      case Policy::TensorList: {
        if (v.isNone()) {
          c.hasher.add(20);
          break;
        }
        const auto list = v.toListRef();
        c.hasher.add(60);
        c.hasher.add(list.size());
        c.reads.reserve(c.reads.size() + list.size());
        for (const auto& item : list) {
          if (item.isNone()) c.hasher.add(20);
          else add_tensor(c, d, item.toTensor(), written, true);
        }
        break;
      }
      case Policy::Number:
        add_scalar(
            c, d.fills && v.isBool() ? c10::IValue(int64_t{v.toBool()}) : v, d.compiled_in[i],
            d.steady[i], d.fills && writes_part(c));
        break;
      case Policy::NumberList: {
        if (v.isNone()) {
          c.hasher.add(20);
          break;
        }
        const auto list = v.toListRef();
        c.hasher.add(61);
        c.hasher.add(list.size());
        if (!d.compiled_in[i] && all_alike(list)) {
          c.hasher.add(62);
          add_scalar(c, list[0], false);
        } else {
          for (const auto& item : list) add_scalar(c, item, d.compiled_in[i]);
        }
        break;
      }
      case Policy::Integers: {
        if (v.isInt()) {
          c.hasher.add(64);
          add_number(c, static_cast<uint64_t>(v.toInt()), Pack::I64, false);
          break;
        }
        const auto list = v.toIntVector();
        c.hasher.add(63);
        c.hasher.add(list.size());
        for (const auto n : list) add_number(c, static_cast<uint64_t>(n), Pack::I64, false);
        break;
      }
      case Policy::Static: hash_static(c.hasher, v); break;
      case Policy::Drop:
        // A factory's device; tensors name theirs.
        if (v.isDevice() && v.toDevice().has_index() && c.device < 0)
          c.device = v.toDevice().index();
        break;
      case Policy::Generator: break;
    }
  }
  for (const auto& w : c.writes) c.hasher.add(w.overwrites ? 31 : 32);
  if (!c.numbers.empty() || !d.bounds.empty()) hash_refusable(c, d, args);
  if (d.window && !window_fits(args, n)) c.hasher.add(93);
  // Inputs that share a storage with a written tensor matter to PyTorch's overlap checks.
  for (size_t k = 0; k < c.writes.size(); ++k)
    for (size_t i = 0; i < c.reads.size(); ++i) {
      const auto &w = c.writes[k], &r = c.reads[i];
      if (r.cell != w.cell || r.tensor == w.tensor) continue;
      c.hasher.add(k << 32 | i);
      c.hasher.add(
          static_cast<uint64_t>(
              r.tensor->storage_offset() - w.tensor->storage_offset() + (1ll << 40)));
    }
  if (c.wide) {
    c.hasher.add(70);
    for (auto& p : c.packs)
      if (p == Pack::F32) p = Pack::F64;
  }
}

std::pair<uint64_t, uint64_t> draw_seed(
    Call& c, const OpDescription& d, const c10::IValue* args, size_t n) {
  at::Generator generator;
  for (size_t i = 0; i < n; ++i)
    if (d.policies[i] == Policy::Generator && !args[i].isNone()) generator = args[i].toGenerator();
  const auto device = c.device < 0 ? current_device() : c.device;
  if (!generator.defined()) generator = default_generator(device);
  c.draw = generator;
  return next_seed(generator, device);
}

std::array<uint64_t, 4> seed_words(std::pair<uint64_t, uint64_t> seed_and_offset) {
  const auto [seed, offset] = seed_and_offset;
  return {seed & 0xffffffffull, seed >> 32, offset & 0xffffffffull, offset >> 32};
}

void add_seed(Call& c, const OpDescription& d, const c10::IValue* args, size_t n) {
  for (uint64_t word : seed_words(draw_seed(c, d, args, n))) add_number(c, word, Pack::I32, false);
}

void settle_type(Value& v, const at::Tensor& t) {
  TPU_ASSERT_LOCKED();
  if (!v.layout.untyped) return;
  const auto item = static_cast<int64_t>(t.element_size());
  const auto nbytes = static_cast<int64_t>(v.nbytes);
  if (t.storage_offset() == 0 && t.numel() * item == nbytes && is_dense(t.sizes(), t.strides())) {
    v.layout.dtype = t.scalar_type();
    v.layout.sizes = Dims(t.sizes().begin(), t.sizes().end());
    v.layout.strides = Dims(t.strides().begin(), t.strides().end());
  } else if (nbytes % item == 0) {
    v.layout.dtype = t.scalar_type();
    v.layout.sizes = {nbytes / item};
    v.layout.strides = {1};
  }
  v.layout.untyped = false;
  if (v.state == State::Host) v.host = typed_host(v.host, v.layout);
}

void set_thread_precision(int precision) { t_precision = precision; }

void set_implementations(uint64_t digest) {
  g_implementations.store(digest, std::memory_order_relaxed);
}
bool has_chosen_implementations() { return g_implementations.load(std::memory_order_relaxed) != 0; }

bool is_whole(const at::Tensor& t) {
  auto& value = *cell_of(t)->value;
  {
    WithoutGil no_gil;
    Lock lock(g_mutex);
    settle_type(value, t);
  }
  const auto& l = value.layout;
  return t.scalar_type() == l.dtype && t.storage_offset() == 0 &&
      t.sizes() == at::IntArrayRef(l.sizes) && t.strides() == at::IntArrayRef(l.strides);
}

}  // namespace tpu

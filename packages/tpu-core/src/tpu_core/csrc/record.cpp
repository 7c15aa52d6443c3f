#include "record.h"

#include "device.h"
#include "memory.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <cstring>
#include <deque>
#include <shared_mutex>

namespace tpu {
namespace {

std::mutex g_descriptions_mutex;
// Tables that hold Python objects are never destroyed: static destructors run after the interpreter's end.
using Signatures = std::unordered_map<Hash128, std::unique_ptr<Signature>, HashOfHash>;
auto& g_descriptions = *new std::unordered_map<std::string, std::unique_ptr<OpDescription>>();
auto& g_signatures = *new Signatures();  // g_mutex
auto& g_zeros = *new Signatures();       // g_mutex

// How an operand is read from, or a result written to, its storage's value.
enum class Form : uint8_t { Whole, Slice, General, Number };

struct Access {
  Form form = Form::Whole;
  const at::Tensor* tensor = nullptr;
  Cell* cell = nullptr;
  ValuePtr value;
  c10::SmallVector<int8_t, 6> dims;  // Slice: for each base dim the tensor's dim, or -1
  int chained = -1;  // a write into the same storage as this earlier write of the same op
  bool overwrites = false;  // a write that leaves nothing of the old value
};

// Everything one call contributes to its signature and node.
struct Call {
  Hasher hasher;
  c10::SmallVector<Access, 4> reads;
  c10::SmallVector<Access, 2> writes;
  c10::SmallVector<uint64_t, 8> numbers;
  c10::SmallVector<Pack, 8> packs;
  c10::SmallVector<uint8_t, 8> compiled_in;
  std::deque<at::Tensor> moved;  // CPU operands copied to the device
  int16_t device = -1;
  bool wide = false;             // a 64-bit float takes part: float numbers keep their width
};

thread_local int t_precision = -1;

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

void add_number(Call& c, uint64_t bits, Pack pack, bool compiled_in) {
  c.numbers.push_back(bits);
  c.packs.push_back(pack);
  c.compiled_in.push_back(compiled_in);
}

bool same_ignoring_ones(at::IntArrayRef sizes, at::IntArrayRef a, const Dims& b) {
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  return true;
}

bool covers(const at::Tensor& t, const Layout& l) {
  return t.storage_offset() == 0 && t.scalar_type() == l.dtype &&
      t.sizes() == at::IntArrayRef(l.sizes) && same_ignoring_ones(t.sizes(), t.strides(), l.strides);
}

// Is the tensor a rectangular window of the base, with its dims in any order? Then its offset becomes
// one start a dim, which may change from call to call without a compile.
bool match_slice(Call& c, Access& a) {
  const auto& t = *a.tensor;
  const auto& l = a.value->layout;
  if (t.scalar_type() != l.dtype || t.numel() == 0) return false;
  const auto n = l.sizes.size();
  if (n > 8) return false;
  a.dims.assign(n, -1);
  for (int64_t i = 0; i < t.dim(); ++i) {
    const auto size = t.size(i), stride = t.stride(i);
    if (size == 1 || stride == 0) continue;
    size_t j = 0;
    for (; j < n; ++j)
      if (l.strides[j] == stride && l.sizes[j] > 1 && l.sizes[j] >= size && a.dims[j] < 0) break;
    if (j == n) return false;
    a.dims[j] = static_cast<int8_t>(i);
  }
  c10::SmallVector<int64_t, 6> starts(n, 0);
  c10::SmallVector<uint8_t, 6> done(n, 0);
  int64_t rest = t.storage_offset();
  for (size_t k = 0; k < n; ++k) {
    size_t best = n;
    for (size_t j = 0; j < n; ++j)
      if (!done[j] && (best == n || l.strides[j] > l.strides[best])) best = j;
    done[best] = 1;
    if (l.sizes[best] == 1 || l.strides[best] == 0) continue;
    starts[best] = rest / l.strides[best];
    rest %= l.strides[best];
    const auto extent = a.dims[best] < 0 ? 1 : t.size(a.dims[best]);
    if (starts[best] + extent > l.sizes[best]) return false;
  }
  if (rest != 0) return false;
  a.form = Form::Slice;
  for (size_t j = 0; j < n; ++j) {
    const auto extent = a.dims[j] < 0 ? 1 : t.size(a.dims[j]);
    if (extent < l.sizes[j])
      add_number(c, static_cast<uint64_t>(starts[j]), Pack::I32, extent != 1);
  }
  return true;
}

void hash_geometry(Hasher& h, const at::Tensor& t) {
  h.add((static_cast<uint64_t>(t.scalar_type()) << 32) | static_cast<uint64_t>(t.dim()));
  for (auto s : t.sizes()) h.add(static_cast<uint64_t>(s));
  if (t.is_contiguous()) {
    h.add(1);
  } else {
    for (auto s : t.strides()) h.add(static_cast<uint64_t>(s));
  }
}

void hash_layout(Hasher& h, const Layout& l) {
  h.add((static_cast<uint64_t>(l.dtype) << 32) | l.sizes.size());
  for (auto s : l.sizes) h.add(static_cast<uint64_t>(s));
  for (auto s : l.strides) h.add(static_cast<uint64_t>(s));
}

void resolve(Call& c, Access& a) {
  const auto& t = *a.tensor;
  a.cell = cell_of(t);
  a.value = a.cell->value;
  settle_type(*a.value, t);
  hash_geometry(c.hasher, t);
  if (covers(t, a.value->layout)) {
    a.form = Form::Whole;
    c.hasher.add(11);
    return;
  }
  hash_layout(c.hasher, a.value->layout);
  if (match_slice(c, a)) {
    c.hasher.add(12);
    c.hasher.add_range(a.dims);
  } else {
    a.form = Form::General;
    c.hasher.add(13);
    c.hasher.add(static_cast<uint64_t>(t.storage_offset()));
  }
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

void add_scalar(Call& c, const c10::IValue& v, bool compiled_in) {
  if (compiled_in || !(v.isInt() || v.isDouble())) {
    hash_static(c.hasher, v);
  } else if (v.isInt()) {
    c.hasher.add(50);
    const auto n = v.toInt();
    add_number(c, static_cast<uint64_t>(n), Pack::I64, n == 0 || n == 1);
  } else {
    c.hasher.add(51);
    const auto x = v.toDouble();
    // The pack is fixed once every operand was seen.
    add_number(c, bits_of(x), Pack::F32, x == 0.0 || x == 1.0);
  }
}

void add_tensor(
    Call& c, const OpDescription& d, const at::Tensor& t, bool written, bool in_list) {
  if (!t.defined()) {
    c.hasher.add(20);
    return;
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    // `x + 2`: a Python number that PyTorch wrapped in a tensor.
    c.hasher.add(24);
    const auto kind = t.scalar_type();
    if (kind == at::kDouble) add_scalar(c, t.item<double>(), false);
    else if (kind == at::kLong) add_scalar(c, t.item<int64_t>(), false);
    else if (kind == at::kBool) add_scalar(c, t.item<bool>(), false);
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
    if (t.dim() == 0 && d.scalar_operands) {
      // Read now: a CPU scalar may be overwritten before the segment runs.
      c.hasher.add(21);
      c.hasher.add(static_cast<uint64_t>(t.scalar_type()));
      const auto kind = t.scalar_type();
      if (at::isFloatingType(kind)) {
        add_number(c, bits_of(t.item<double>()), kind == at::kDouble ? Pack::F64 : Pack::F32, false);
      } else if (at::isIntegralType(kind, false)) {
        add_number(c, static_cast<uint64_t>(t.item<int64_t>()), Pack::I64, false);
      } else if (kind == at::kBool) {
        add_number(c, static_cast<uint64_t>(t.item<bool>()), Pack::I64, false);
      } else {
        wrong_device(t, c.device);
      }
      return;
    }
    if (!(in_list && d.host_operands)) wrong_device(t, c.device);
    c.moved.push_back(to_device(t, c.device < 0 ? current_device() : c.device));
    operand = &c.moved.back();
  }
  check_device(c, *operand);
  if (operand->scalar_type() == at::kDouble || operand->scalar_type() == at::kComplexDouble)
    c.wide = true;
  c.hasher.add(written ? 23 : 22);
  if (!(written && d.write_only)) {
    Access read;
    read.tensor = operand;
    resolve(c, read);
    c.reads.push_back(std::move(read));
  }
  if (written) {
    Access write;
    write.tensor = operand;
    resolve(c, write);
    write.overwrites = overwrites(*operand, write);
    for (size_t k = 0; k < c.writes.size(); ++k) {
      auto& earlier = c.writes[k];
      if (earlier.cell != write.cell) continue;
      write.chained = static_cast<int>(k);
      // Each of them is described by the layout that the value had before the op.
      earlier.overwrites = earlier.form == Form::Whole;
      write.overwrites = write.form == Form::Whole;
    }
    c.hasher.add(static_cast<uint64_t>(write.chained + 1));
    c.writes.push_back(std::move(write));
  }
}

void gather(Call& c, const OpDescription& d, const c10::IValue* args, size_t n) {
  c.hasher.add(d.hash);
  if (d.precision) c.hasher.add(matmul_precision());
  c.wide = d.wide_numbers;
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
        for (const auto& item : list) {
          if (item.isNone()) c.hasher.add(20);
          else add_tensor(c, d, item.toTensor(), written, true);
        }
        break;
      }
      case Policy::Number:
        add_scalar(c, v, d.compiled_in[i]);
        break;
      case Policy::NumberList: {
        if (v.isNone()) {
          c.hasher.add(20);
          break;
        }
        const auto list = v.toListRef();
        c.hasher.add(61);
        c.hasher.add(list.size());
        for (const auto& item : list) add_scalar(c, item, d.compiled_in[i]);
        break;
      }
      case Policy::Static:
        hash_static(c.hasher, v);
        break;
      case Policy::Drop:
        // A factory's device; tensors name theirs.
        if (v.isDevice() && v.toDevice().has_index() && c.device < 0) c.device = v.toDevice().index();
        break;
      case Policy::Generator:
        break;
    }
  }
  for (const auto& w : c.writes) c.hasher.add(w.overwrites ? 31 : 32);
  // Inputs that share a storage with a written tensor matter to PyTorch's overlap checks.
  for (auto& w : c.writes)
    for (auto& r : c.reads)
      if (r.cell == w.cell && r.tensor != w.tensor)
        c.hasher.add(static_cast<uint64_t>(
            r.tensor->storage_offset() - w.tensor->storage_offset() + (1ll << 40)));
  if (c.wide) {
    c.hasher.add(70);
    for (auto& p : c.packs)
      if (p == Pack::F32) p = Pack::F64;
  }
}

void add_seed(Call& c, const OpDescription& d, const c10::IValue* args, size_t n) {
  at::Generator generator;
  for (size_t i = 0; i < n; ++i)
    if (d.policies[i] == Policy::Generator && !args[i].isNone()) generator = args[i].toGenerator();
  const auto [seed, offset] =
      next_seed(generator, c.device < 0 ? current_device() : c.device);
  for (uint64_t word : std::array<uint64_t, 4>{
           seed & 0xffffffffull, seed >> 32, offset & 0xffffffffull, offset >> 32})
    add_number(c, word, Pack::I32, false);
}

py::object describe_access(const Access& a) {
  auto list = [](auto range) {
    return py::tuple(py::cast(std::vector<int64_t>(range.begin(), range.end())));
  };
  const auto& l = a.value->layout;
  const auto& t = *a.tensor;
  return py::make_tuple(
      static_cast<int>(a.form),
      static_cast<int>(l.dtype),
      list(at::IntArrayRef(l.sizes)),
      list(at::IntArrayRef(l.strides)),
      static_cast<int>(t.scalar_type()),
      list(t.sizes()),
      list(t.strides()),
      t.storage_offset(),
      list(at::ArrayRef<int8_t>(a.dims)),
      a.overwrites,
      a.chained);
}

Layout layout_of(py::handle meta) {
  auto t = meta.cast<py::tuple>();
  Layout l;
  l.dtype = static_cast<at::ScalarType>(t[0].cast<int>());
  for (auto s : t[1]) l.sizes.push_back(s.cast<int64_t>());
  for (auto s : t[2]) l.strides.push_back(s.cast<int64_t>());
  return l;
}

// The cold path: PyTorch's meta function checks the call and gives the outputs' geometry.
std::unique_ptr<Signature> miss(
    const OpDescription& d, const Call& c, const c10::IValue* args, size_t n) {
  py::gil_scoped_acquire gil;
  py::list arguments, reads, writes, packs;
  for (size_t i = 0; i < n; ++i) arguments.append(torch::jit::toPyObject(args[i]));
  for (const auto& a : c.reads) reads.append(describe_access(a));
  for (const auto& a : c.writes) writes.append(describe_access(a));
  for (auto p : c.packs) packs.append(static_cast<int>(p));
  py::tuple answer =
      callback("miss")(d.python, py::tuple(arguments), reads, writes, packs).cast<py::tuple>();
  auto s = std::make_unique<Signature>();
  s->hash = c.hasher.digest();
  s->plan = answer[1];
  s->kind = static_cast<Signature::Kind>(answer[0].cast<int>());
  if (s->kind != Signature::Kind::Record) return s;
  for (auto meta : answer[2]) {
    if (meta.is_none()) s->fresh.emplace_back(std::nullopt);
    else s->fresh.emplace_back(layout_of(meta));
  }
  for (auto size : answer[3]) s->list_sizes.push_back(size.cast<uint32_t>());
  for (auto constant : answer[4]) s->constants.push_back(constant.cast<int64_t>());
  s->packs.assign(c.packs.begin(), c.packs.end());
  s->compiled_in.assign(c.compiled_in.begin(), c.compiled_in.end());
  return s;
}

void resize_outputs(const Signature& s, const c10::IValue* args, size_t n) {
  py::gil_scoped_acquire gil;
  py::list arguments;
  for (size_t i = 0; i < n; ++i) arguments.append(torch::jit::toPyObject(args[i]));
  s.plan(py::tuple(arguments));
}

const Signature* zeros_signature(const Layout& l) {
  Hasher h;
  h.add(80);
  hash_layout(h, l);
  auto& s = g_zeros[h.digest()];
  if (!s) {
    s = std::make_unique<Signature>();
    s->hash = h.digest();
    s->fresh.emplace_back(l);
  }
  return s.get();
}

// The slot of a value that a node reads. Uninitialised memory reads as zeros.
uint32_t operand_slot(Trace* trace, Cell* cell, const ValuePtr& v, const Line& line) {
  if (v->state != State::Uninitialized) return trace->input_slot(v);
  auto& s = trace->current;
  if (v->stamp == s.stamp) return v->slot;
  const auto* zeros = zeros_signature(v->layout);
  auto fresh = make_value(v->layout, v->nbytes, v->device, State::Pending);
  const auto refs = static_cast<uint32_t>(s.refs.size());
  const auto slot = trace->output_slot(fresh);
  s.refs.push_back(slot);
  s.nodes.push_back({zeros, refs, 0, 1, static_cast<uint32_t>(s.numbers.size()), line});
  s.hasher.add(zeros->hash);
  s.hasher.add(slot);
  if (cell->value == v) cell->value = fresh;
  return slot;
}

at::Tensor new_tensor(const Layout& l, int16_t device, ValuePtr& value) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  const auto meta = c10::scalarTypeToTypeMeta(l.dtype);
  const size_t nbytes = at::detail::computeStorageNbytes(l.sizes, l.strides, meta.itemsize());
  auto data = allocate_pending(nbytes, device, l, value);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data), device_allocator(), true);
  auto t = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), keys, meta);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(l.sizes, l.strides);
  return t;
}

// Another trace may still have to make an operand; recording starts over once it has.
bool settle_operands(Call& c, Trace* trace, Lock& lock) {
  auto foreign = [&](const ValuePtr& v) {
    return (v->state == State::Pending && v->trace != trace) || v->state == State::Running;
  };
  bool settled = false;
  for (auto* accesses : {&c.reads})
    for (auto& a : *accesses)
      if (foreign(a.value)) settle(a.value, lock, "another thread's value"), settled = true;
  for (auto& a : c.writes)
    if (foreign(a.value)) settle(a.value, lock, "another thread's value"), settled = true;
  return settled;
}

void raise_failed(const Call& c) {
  for (const auto& a : c.reads)
    if (a.value->state == State::Failed) a.value->failure->raise();
}

// Destroys a description or signature that another thread's took the place of: its Python objects
// need the GIL.
template <typename T>
void forget(std::unique_ptr<T> superseded) {
  py::gil_scoped_acquire gil;
  superseded.reset();
}

}  // namespace

void settle_type(Value& v, const at::Tensor& t) {
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

OpDescription* describe_op(const c10::OperatorHandle& op) {
  const auto name = c10::toString(op.operator_name());
  {
    std::lock_guard<std::mutex> lock(g_descriptions_mutex);
    auto it = g_descriptions.find(name);
    if (it != g_descriptions.end()) return it->second.get();
  }
  ensure_initialized();
  py::gil_scoped_acquire gil;
  py::dict info = callback("describe")(op.operator_name().name, op.operator_name().overload_name);
  auto d = std::make_unique<OpDescription>();
  d->name = name;
  Hasher h;
  h.add_bytes(name);
  d->hash = h.digest();
  for (auto p : info["policies"]) d->policies.push_back(static_cast<Policy>(p.cast<int>()));
  for (auto p : info["compiled_in"]) d->compiled_in.push_back(p.cast<bool>());
  for (auto p : info["writes"]) d->writes.push_back(p.cast<bool>());
  d->write_only = info["write_only"].cast<bool>();
  for (auto r : info["returns"]) d->returns.push_back(r.cast<int>());
  d->random = info["random"].cast<bool>();
  d->scalar_operands = info["scalar_operands"].cast<bool>();
  d->host_operands = info["host_operands"].cast<bool>();
  d->precision = info["precision"].cast<bool>();
  d->wide_numbers = info["wide_numbers"].cast<bool>();
  d->python = info["op"];
  d->handler = info["handler"];
  std::lock_guard<std::mutex> lock(g_descriptions_mutex);
  auto& held = g_descriptions[name];
  if (held) {  // another thread was first
    forget(std::move(d));
    return held.get();
  }
  held = std::move(d);
  return held.get();
}

namespace {

void call_python(
    py::handle handler, const OpDescription& d, const c10::OperatorHandle& op,
    torch::jit::Stack* stack, size_t n) {
  py::gil_scoped_acquire gil;
  py::list arguments;
  for (size_t i = 0; i < n; ++i)
    arguments.append(torch::jit::toPyObject((*stack)[stack->size() - n + i]));
  py::object result = handler(d.python, py::tuple(arguments));
  torch::jit::drop(*stack, n);
  const auto& returns = op.schema().returns();
  if (returns.size() == 1) {
    stack->push_back(torch::jit::toIValue(result, returns[0].type()));
  } else if (!returns.empty()) {
    auto t = result.cast<py::tuple>();
    for (size_t i = 0; i < returns.size(); ++i)
      stack->push_back(torch::jit::toIValue(t[i], returns[i].type()));
  }
}

}  // namespace

void record(const OpDescription& d, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n = d.policies.size();
  if (in_bad_fork()) ensure_initialized();  // raises, before any lock that another thread may have held
  if (d.handler && !d.handler.is_none()) return call_python(d.handler, d, op, stack, n);
  const auto* args = stack->data() + stack->size() - n;
  const Signature* signature = nullptr;
  std::vector<at::Tensor> fresh;
  {
    Lock lock(g_mutex, std::defer_lock);
    {
      WithoutGil no_gil;
      lock.lock();
    }
    while (true) {
      Call c;
      gather(c, d, args, n);
      const auto hash = c.hasher.digest();
      auto it = g_signatures.find(hash);
      if (it == g_signatures.end()) {
        lock.unlock();
        auto made = miss(d, c, args, n);
        {
          WithoutGil no_gil;
          lock.lock();
        }
        count_signature();
        auto& held = g_signatures[hash];
        if (held) forget(std::move(made));  // another thread was first
        else held = std::move(made);
        continue;
      }
      signature = it->second.get();
      if (signature->kind == Signature::Kind::Python) break;
      if (signature->kind == Signature::Kind::Resize) {
        // An out= tensor takes the shape of the result, then the call has another signature.
        lock.unlock();
        resize_outputs(*signature, args, n);
        WithoutGil no_gil;
        lock.lock();
        continue;
      }
      raise_failed(c);
      if (c.device < 0) c.device = current_device();
      Trace* trace = current_trace(c.device);
      if (settle_operands(c, trace, lock)) continue;
      if (d.random) add_seed(c, d, args, n);
      if (d.random)
        TORCH_INTERNAL_ASSERT(signature->packs.size() + 4 == c.packs.size());

      const Line line = user_line();
      c10::SmallVector<uint32_t, 8> slots;
      for (auto& a : c.reads) slots.push_back(operand_slot(trace, a.cell, a.value, line));
      for (auto& a : c.writes)
        if (!a.overwrites && a.chained < 0)
          slots.push_back(operand_slot(trace, a.cell, a.cell->value, line));
      auto& s = trace->current;
      const auto refs = static_cast<uint32_t>(s.refs.size());
      const auto operands = static_cast<uint32_t>(slots.size());
      s.refs.insert(s.refs.end(), slots.begin(), slots.end());
      s.hasher.add(signature->hash);
      for (auto slot : slots) s.hasher.add(slot);
      for (const auto& layout : signature->fresh) {
        if (!layout) {
          fresh.emplace_back();
          s.refs.push_back(kNoSlot);
          continue;
        }
        ValuePtr value;
        fresh.push_back(new_tensor(*layout, c.device, value));
        s.refs.push_back(trace->output_slot(value));
      }
      for (auto& a : c.writes) {
        Layout layout = a.cell->value->layout;
        if (a.overwrites && a.form != Form::Whole)
          layout = {a.tensor->scalar_type(),
                    Dims(a.tensor->sizes().begin(), a.tensor->sizes().end()),
                    Dims(a.tensor->strides().begin(), a.tensor->strides().end())};
        auto value = make_value(std::move(layout), a.cell->value->nbytes, c.device, State::Pending);
        s.refs.push_back(trace->output_slot(value));
        a.cell->value = std::move(value);
      }
      s.nodes.push_back(
          {signature, refs, operands,
           static_cast<uint32_t>(s.refs.size() - refs - operands),
           static_cast<uint32_t>(s.numbers.size()), line});
      s.numbers.insert(s.numbers.end(), c.numbers.begin(), c.numbers.end());
      s.packs.insert(s.packs.end(), c.packs.begin(), c.packs.end());
      // What starts as a constant is the signature's first sight of it.
      s.compiled_in.insert(
          s.compiled_in.end(), signature->compiled_in.begin(), signature->compiled_in.end());
      s.compiled_in.resize(s.numbers.size(), 0);
      count_op();
      c.reads.clear();
      c.writes.clear();
      const auto bound = mode().max_ops;
      if (bound && static_cast<int64_t>(s.nodes.size()) >= bound)
        flush(trace, lock, bound == 1 ? "one op a segment" : "size bound");
      break;
    }
  }
  if (signature->kind == Signature::Kind::Python)
    return call_python(signature->plan, d, op, stack, n);

  c10::SmallVector<c10::IValue, 4> results;
  size_t next = 0, lists = 0, constants = 0;
  for (auto r : d.returns) {
    if (r >= 0) {
      results.push_back(args[r]);
    } else if (r == -1) {
      results.emplace_back(std::move(fresh[next++]));
    } else if (r == -3) {
      results.emplace_back(signature->constants[constants++]);
    } else {
      c10::List<at::Tensor> list;
      for (uint32_t i = 0; i < signature->list_sizes[lists]; ++i)
        list.push_back(std::move(fresh[next++]));
      ++lists;
      results.emplace_back(std::move(list));
    }
  }
  torch::jit::drop(*stack, n);
  for (auto& r : results) stack->push_back(std::move(r));
}

void Recorder::operator()(
    const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (!description_) description_ = describe_op(op);
  record(*description_, op, stack);
}

}  // namespace tpu

// The cold path of recording: Python is asked about a call of a form that was not seen before.
#include "execution/program.h"
#include "recorder/call.h"
#include "recorder/checks.h"
#include "recorder/torchscript.h"
#include "values/memory.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

py::object describe_access(const Access& a) {
  auto list = [](auto range) {
    return py::tuple(py::cast(std::vector<int64_t>(range.begin(), range.end())));
  };
  const auto& l = a.value->layout;
  const auto& t = *a.tensor;
  return py::make_tuple(
      static_cast<int>(a.form), static_cast<int>(l.dtype), list(at::IntArrayRef(l.sizes)),
      list(at::IntArrayRef(l.strides)), static_cast<int>(t.scalar_type()), list(t.sizes()),
      list(t.strides()), t.storage_offset(), list(at::ArrayRef<int8_t>(a.dims)), a.overwrites,
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

// Arguments for Python to look at, in place of those on the device: tensors of the same geometry, which
// share memory where those do. What Python has seen is held by its Python object from then on, and
// autograd adds a gradient in place only where nothing else holds it: the first round of a loop would
// record other ops than the next.
class StandIns {
 public:
  c10::IValue of(const c10::IValue& v) {
    if (v.isTensor()) return of(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(of(t));
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional(of(*t)) : std::nullopt);
      return list;
    }
    return v;
  }

 private:
  at::Tensor of(const at::Tensor& t) {
    if (!t.defined() || !t.is_privateuseone() || !t.has_storage()) return t;
    auto* impl = t.unsafeGetTensorImpl();
    auto& copy = copies_[impl];
    if (!copy.defined()) {
      copy = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
      copy.unsafeGetTensorImpl()->set_storage_keep_dtype(of(t.storage()));
    }
    return copy;
  }

  const c10::Storage& of(const c10::Storage& s) {
    auto& copy = memory_[s.unsafeGetStorageImpl()];
    if (!copy)
      copy = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), s.nbytes(), at::DataPtr(nullptr, s.device()),
          device_allocator(), s.resizable());
    return copy;
  }

  std::unordered_map<const c10::TensorImpl*, at::Tensor> copies_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> memory_;
};

}  // namespace

std::unique_ptr<Signature> ask_for_signature(
    const OpDescription& d, const Call& c, const c10::IValue* args, size_t n) {
  py::gil_scoped_acquire gil;
  const NotTraced not_traced;
  py::list arguments, reads, writes, packs;
  StandIns stand_ins;
  for (size_t i = 0; i < n; ++i) arguments.append(torch::jit::toPyObject(stand_ins.of(args[i])));
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
  if (const auto identity = answer[5].cast<std::string>(); !identity.empty()) {
    // What the op computes follows from more than its name and arguments.
    Hasher h;
    h.add(s->hash);
    h.add_bytes(identity);
    s->hash = h.digest();
  }
  for (auto meta : answer[2]) {
    if (meta.is_none()) s->fresh.emplace_back(std::nullopt);
    else s->fresh.emplace_back(layout_of(meta));
  }
  s->is_checked = answer[6].cast<bool>();
  if (s->is_checked) s->fresh.emplace_back(word_layout());
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
  Function(s.plan)(py::tuple(arguments));
}

}  // namespace tpu

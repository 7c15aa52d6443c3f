// Device tensors in host memory: the CPU tensors that stand for them, and the device tensors that results of
// CPU kernels become.
#pragma once

#include "recorder/call.h"
#include "values/value.h"

#include <utility>

namespace tpu {

// Whether the host tensor lies in memory as the layout says, from its storage's first byte on.
inline bool is_in_memory_order(const at::Tensor& host, const Layout& l) {
  return host.storage_offset() == 0 &&
      (l.untyped || host.numel() == 0 || host.strides() == at::IntArrayRef(l.strides));
}
// Whether nothing else holds the value or its memory. Needs g_mutex.
bool is_exclusive(const ValuePtr& v);
// Has the value's memory on the host, elements in the order of its layout; the value is settled.
void bring_to_host(const ValuePtr& v);
// Gives a cell memory that nothing else reads; `keeps`: with what it holds.
void make_exclusive(Cell* cell, bool keeps);

// Whether a tensor is its storage's value as it lies on the host.
bool is_the_value(const at::Tensor& t, const Value& v);
// A CPU tensor of the geometry of a device's, on the host memory of its storage.
at::Tensor alias_of(const at::Tensor& t, const at::Tensor& host);
// The same for a call of `run`'s length; `written` gives it memory that nothing else reads. Settles what is
// pending. g_mutex is not held.
at::Tensor host_alias(const at::Tensor& t, bool written);
// Host memory that lies as the layout says, with these values; with zeros where there are none.
at::Tensor memory_like(const Layout& l, const at::Tensor& values);

// The value of a storage that holds the memory of a CPU tensor; takes the tensor itself where that will do.
ValuePtr value_of_memory(at::Tensor& t, int16_t device);
// A device tensor whose storage holds the memory of a CPU tensor, which is strided and shares none.
at::Tensor device_tensor(at::Tensor t, int16_t device);

// What results of a CPU kernel become: device tensors whose storages hold the memory.
class Results {
 public:
  explicit Results(int16_t device) : device_(device) {}

  // Memory of an operand is none of a new result's.
  void is_operand(const at::Tensor& alias) {
    operands_.push_back(alias.storage().unsafeGetStorageImpl());
  }
  at::Tensor operator()(at::Tensor t);
  // The same for all results of a call, those of lists too; where `returns` names an argument, that.
  void replace(
      c10::IValue* results, size_t n, const std::vector<int>& returns, const c10::IValue* args);

 private:
  int16_t device_;
  c10::SmallVector<const c10::StorageImpl*, 8> operands_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 2> made_;
};

// Marks values as written for as long as a kernel runs. Marked with g_mutex, ended without.
class Writing {
 public:
  Writing() = default;
  Writing(const Writing&) = delete;
  ~Writing();
  void add(const ValuePtr& v) { values_.push_back(v); }
  void clear() { values_.clear(); }  // before `begin`
  void begin() {
    for (const auto& v : values_) ++v->writers;
    is_marked_ = !values_.empty();
  }

 private:
  c10::SmallVector<ValuePtr, 2> values_;
  bool is_marked_ = false;
};

}  // namespace tpu

#include "execution/direct_call.h"

#include "execution/host_kernels.h"
#include "execution/profiler.h"
#include "recorder/capture.h"
#include "recorder/threads.h"
#include "recorder/tier_key.h"
#include "runtime/source_location.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace tpu {
namespace {

// Whether a kernel writes what lies in memory, and no more: an out= tensor may change its geometry.
bool keeps_geometry(const c10::OperatorHandle& op) {
  for (const auto& a : op.schema().arguments())
    if (a.is_out()) return false;
  return !op.hasTag(at::Tag::inplace_view);
}

// Whether a tensor, the host memory of its storage's value and the value's layout are of one geometry.
bool is_plain_value(const at::Tensor& t, const Value& v) {
  const auto& l = v.layout;
  const auto& host = v.host;
  const auto n = static_cast<size_t>(t.dim());
  if (t.scalar_type() != l.dtype || n != l.sizes.size() || n != static_cast<size_t>(host.dim()) ||
      (t.storage_offset() | host.storage_offset()))
    return false;
  const int64_t *a = t.sizes().data(), *b = t.strides().data();
  const int64_t *c = host.sizes().data(), *d = host.strides().data();
  int64_t differs = 0;
  for (size_t i = 0; i < n; ++i)
    differs |= (a[i] ^ c[i]) | (b[i] ^ d[i]) | (a[i] ^ l.sizes[i]) | (b[i] ^ l.strides[i]);
  return differs == 0;
}

bool is_direct(const OpDescription& d) {
  const int known = d.direct.load(std::memory_order_acquire);
  if (known >= 0) return known != 0;
  const bool has_kernel = host_kernel(d) && d.chance < 0 && !(d.has_handler() && d.is_foreign);
  const bool has_function = !d.has_handler() && (d.random || d.function);
  const bool found = (has_kernel || has_function) && !d.is_unfit_for_host && keeps_geometry(d.op);
  d.direct.store(found, std::memory_order_release);
  return found;
}

}  // namespace

DirectCall::DirectCall(const OpDescription& d, const c10::IValue* args, bool takes_functions)
    : d_(d), args_(args) {
  if (tiers() == Tiers::Compiled || !is_direct(d) || in_bad_fork() || is_profiling() ||
      any_captures())
    return;
  if (d.random || d.function) {
    function_ = takes_functions ? function_of_call(d, args) : nullptr;
    if (!function_) return;
  }
  const Mode& m = mode();
  if (m.inspect || has_chosen_implementations()) return;
  const bool grad_mode = at::GradMode::is_enabled();
  no_gil_.emplace();
  Lock lock(g_mutex);
  TierKey key(d);
  const bool are_ready = each_operand(d, args, key, [&](const at::Tensor& t, size_t argument) {
    const auto* impl = t.unsafeGetTensorImpl();
    if (!t.is_privateuseone()) {  // a Python number; other CPU tensors are for the long way
      key.add_host_operand(t);
      return impl->is_wrapped_number() && t.is_cpu() && is_plain_tensor(t);
    }
    if (!is_plain_tensor(t) || impl->is_wrapped_number()) return false;
    const auto index = static_cast<int16_t>(t.device().index());
    if (device_ < 0) device_ = index;
    is_differentiated_ = is_differentiated_ || (grad_mode && t.requires_grad());
    return device_ == index && take(t, cell_of(t)->value, d.writes[argument], key);
  });
  key_ = key.value();
  is_ready_ = are_ready && device_ >= 0 && begin(m, lock);
  if (!is_ready_) operands_.clear();
}

// Adds the CPU tensor of an operand, if it is there to be read or written.
bool DirectCall::take(const at::Tensor& t, const ValuePtr& v, bool is_written, TierKey& key) {
  const auto& l = v->layout;
  if (v->state == State::Uninitialized) settle_type(*v, t);
  if (l.untyped) return false;
  if (v->state == State::Uninitialized) {  // all of it is to be written
    const bool is_whole = t.storage_offset() == 0 && t.scalar_type() == l.dtype &&
        t.sizes() == at::IntArrayRef(l.sizes) && t.strides() == at::IntArrayRef(l.strides);
    if (!is_written || !d_.write_only || !is_whole || v.use_count() != 1) return false;
    unwritten_.emplace_back(operands_.size(), v.get());
    operands_.emplace_back();
    writing_.add(v);
    key.add_geometry(t);
    return true;
  }
  if (v->state != State::Host || (is_written && !is_exclusive(v))) return false;
  if (is_plain_value(t, *v) && !(is_written && v->host.is_inference())) {
    key.add_geometry(t);
    operands_.push_back(v->host);
  } else {
    if (!is_in_memory_order(v->host, l)) return false;
    key.add_operand(t, l);
    // PyTorch asks whether an operand is the result itself.
    const at::Tensor* same = nullptr;
    for (const auto& [impl, i] : written_views_)
      if (impl == t.unsafeGetTensorImpl()) same = &operands_[i];
    if (is_written) written_views_.emplace_back(t.unsafeGetTensorImpl(), operands_.size());
    operands_.push_back(same ? at::Tensor(*same) : alias_of(t, v->host));
  }
  if (is_written) writing_.add(v);
  return true;
}

// Enters the op into the tiers' segment, if the host is to run it.
bool DirectCall::begin(const Mode& m, Lock& lock) {
  trace_ = current_trace(device_);
  if (tiers() == Tiers::Auto && m.max_ops != 1) {
    auto& tiering = trace_->tiering;
    if (!d_.has_handler()) {
      const auto choice = tiering.choose(key_);
      if (choice == Tiering::Choice::Cut) {
        operands_.clear();
        writing_.clear();
        flush(trace_, lock, kForHost);
      }
      if (choice != Tiering::Choice::Host) return false;
      enter_host_op(*trace_, m, key_);
    } else {  // such as `nonzero`: a segment by itself
      if (tiering.is_recording()) return false;
      tiering.end();
      enter_host_op(*trace_, m, key_);
      tiering.end_after_op();
    }
  }
  for (const auto& [i, v] : unwritten_) {
    const auto& l = v->layout;
    v->set_host(at::detail::empty_strided_cpu(l.sizes, l.strides, l.dtype), false);
    operands_[i] = v->host;
  }
  if (function_ && draws(d_, args_)) {
    Call c;
    c.device = device_;
    const auto [seed, offset] = draw_seed(c, d_, args_, d_.policies.size());
    drawn_ = derive_key(seed, offset);
  }
  is_first_ = count_host_op();
  if (is_differentiated_) user_line();  // for the backward ops
  writing_.begin();
  return true;
}

void DirectCall::give_up() {
  for (const auto& [i, v] : unwritten_)  // what was never written reads as zeros
    std::memset(operands_[i].mutable_data_ptr(), 0, operands_[i].nbytes());
  Lock lock(g_mutex);
  trace_->tiering.failed(key_);
}

at::Tensor DirectCall::result(at::Tensor t) const {
  const bool is_new = t.defined() && is_plain_tensor(t) &&
      std::none_of(operands_.begin(), operands_.end(), [&](const at::Tensor& operand) {
                        return operand.storage().is_alias_of(t.storage());
                      });
  if (is_new) return device_tensor(std::move(t), device_);
  Results results(device_);
  for (const auto& operand : operands_) results.is_operand(operand);
  return results(std::move(t));
}

c10::IValue DirectCall::on_host(const c10::IValue& v, size_t& next) const {
  auto operand = [&](const at::Tensor& t) {
    return t.defined() && t.is_privateuseone() ? operands_[next++] : t;
  };
  if (v.isTensor()) return operand(v.toTensor());
  if (v.isDevice()) return c10::Device(c10::kCPU);
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    list.reserve(v.toListRef().size());
    for (const c10::IValue& t : v.toListRef()) list.push_back(operand(t.toTensor()));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& t : v.toListRef())
      list.push_back(t.isNone() ? std::nullopt : std::optional(operand(t.toTensor())));
    return list;
  }
  return v;
}

bool DirectCall::put_small(const c10::IValue* args, torch::jit::Stack& stack, size_t first) const {
  SmallResults made;
  if (function_ || !compute_small(args, made)) return false;
  stack.resize(first);
  if (d_.returns.empty()) return true;  // lists in place
  if (!args[0].isTensorList()) {
    stack.emplace_back(made.empty() ? operands_[0] : made[0]);
  } else {
    c10::List<at::Tensor> list;
    list.reserve(made.size());
    for (auto& t : made) list.push_back(std::move(t));
    stack.emplace_back(std::move(list));
  }
  return true;
}

bool DirectCall::run(torch::jit::Stack& stack) {
  const size_t n = d_.policies.size(), first = stack.size() - n;
  c10::SmallVector<c10::IValue, 8> args;
  args.reserve(n);
  for (size_t i = 0; i < n; ++i) args.push_back(std::move(stack[first + i]));
  auto put_back = [&] {
    stack.resize(first);
    for (auto& a : args) stack.push_back(std::move(a));
  };
  try {
    const bool has_run = run([&] {
      if (put_small(args.data(), stack, first)) return;
      size_t next = 0;
      for (size_t i = 0; i < n; ++i) stack[first + i] = on_host(args[i], next);
      if (function_) {
        torch::jit::Stack own(stack.begin() + static_cast<ptrdiff_t>(first), stack.end());
        stack.resize(first);
        function_(drawn_, own);
        std::move(own.begin(), own.end(), std::back_inserter(stack));
      } else {
        d_.host->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      }
    });
    if (!has_run) {
      put_back();
      return false;
    }
  } catch (...) {
    put_back();
    throw;
  }
  Results results(device_);
  for (const auto& operand : operands_) results.is_operand(operand);
  results.replace(stack.data() + first, stack.size() - first, d_.returns, args.data());
  return true;
}

}  // namespace tpu

#include "recorder/record.h"

#include "execution/direct_call.h"
#include "execution/host_kernels.h"
#include "execution/profiler.h"
#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/checks.h"
#include "recorder/tensors.h"
#include "recorder/threads.h"
#include "recorder/torchscript.h"
#include "values/device.h"
#include "values/memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace tpu {
namespace {

// Tables that hold Python objects are never destroyed: static destructors run after the interpreter's end.
using Signatures = ska::flat_hash_map<Hash128, std::unique_ptr<Signature>, HashOfHash>;
auto& g_signatures = *new Signatures();  // g_mutex
auto& g_zeros = *new Signatures();       // g_mutex

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

at::Tensor new_tensor(const Layout& l, int16_t device, ValuePtr& value) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  const auto meta = c10::scalarTypeToTypeMeta(l.dtype);
  const size_t nbytes = at::detail::computeStorageNbytes(l.sizes, l.strides, meta.itemsize());
  value = make_value(l, nbytes, device, State::Pending);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, allocate(value), device_allocator(), true);
  auto t = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), keys, meta);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(l.sizes, l.strides);
  return t;
}

// Another trace may still have to make an operand; recording starts over once it has.
bool settle_operands(Call& c, Trace* trace, Lock& lock) {
  auto foreign = [&](const ValuePtr& v) {
    if (v->is_promised()) return false;  // the cut waits for it
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

// Whether a tensor has the elements of a layout in the same dims, but for dims of size 1. A gradient of
// (1, n), which a bias of (n) has, stays one when it is overwritten, so that a loop's second round is as
// its third.
bool differs_in_ones(const Layout& l, const at::Tensor& t) {
  auto dims = [](at::IntArrayRef sizes, at::IntArrayRef strides) {
    c10::SmallVector<std::pair<int64_t, int64_t>, 6> kept;
    for (size_t i = 0; i < sizes.size(); ++i)
      if (sizes[i] != 1) kept.emplace_back(sizes[i], strides[i]);
    return kept;
  };
  return !l.untyped && l.dtype == t.scalar_type() &&
      dims(l.sizes, l.strides) == dims(t.sizes(), t.strides());
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

uint32_t operand_slot(Trace* trace, Cell* cell, ValuePtr v, const Line& line) {
  // A graph reads the storages that were there before it whatever they hold, but for empty ones.
  const auto& capture = trace->capture;
  const bool is_input = v->state != State::Uninitialized || (capture && !capture->is_own(cell));
  if (is_input && (!capture || cell->address)) return trace->input_slot(std::move(v));
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

void call_python(
    py::handle handler, const OpDescription& d, const c10::OperatorHandle& op,
    torch::jit::Stack* stack) {
  const size_t n = d.policies.size();
  py::gil_scoped_acquire gil;
  const NotTraced not_traced;
  py::list arguments;
  for (size_t i = 0; i < n; ++i)
    arguments.append(torch::jit::toPyObject((*stack)[stack->size() - n + i]));
  py::object result = Function(handler)(d.python, py::tuple(arguments));
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

namespace {

// Appends the node of a call to a trace. Writes get new values, and so do the new tensors.
void append(Trace* trace, Call& c, const Signature* signature, Recorded& recorded) {
  const Line line = user_line();
  c10::SmallVector<uint32_t, 8> slots;
  slots.reserve(c.reads.size() + c.writes.size());
  for (auto& a : c.reads) slots.push_back(operand_slot(trace, a.cell, std::move(a.value), line));
  for (auto& a : c.writes)
    if (!a.overwrites && a.chained < 0)
      slots.push_back(operand_slot(trace, a.cell, a.cell->value, line));
  auto& s = trace->current;
  const auto refs = static_cast<uint32_t>(s.refs.size());
  const auto operands = static_cast<uint32_t>(slots.size());
  s.refs.insert(s.refs.end(), slots.begin(), slots.end());
  s.hasher.add(signature->hash);
  for (auto slot : slots) s.hasher.add(slot);
  const auto* word = signature->is_checked ? &signature->fresh.back() : nullptr;
  for (const auto& layout : signature->fresh) {
    if (&layout == word) {
      const auto slot = trace->output_slot(make_value(*layout, 0, c.device, State::Pending));
      s.words.emplace_back(static_cast<uint32_t>(s.nodes.size()), slot);
      s.refs.push_back(slot);
      continue;
    }
    if (!layout) {
      recorded.fresh.emplace_back();
      s.refs.push_back(kNoSlot);
      continue;
    }
    ValuePtr value;
    recorded.fresh.push_back(new_tensor(*layout, c.device, value));
    s.refs.push_back(trace->output_slot(std::move(value)));
  }
  for (auto& a : c.writes) {
    Layout layout = a.cell->value->layout;
    if (a.overwrites && a.form != Form::Whole && !differs_in_ones(layout, *a.tensor))
      layout = {
          a.tensor->scalar_type(), Dims(a.tensor->sizes().begin(), a.tensor->sizes().end()),
          Dims(a.tensor->strides().begin(), a.tensor->strides().end())};
    auto made = make_value(layout, a.cell->value->nbytes, c.device, State::Pending);
    remember_former(s, *trace, a.cell, made.get());
    a.cell->value = std::move(made);
    s.refs.push_back(trace->output_slot(a.cell->value));
  }
  s.nodes.push_back(
      {signature, refs, operands, static_cast<uint32_t>(s.refs.size() - refs - operands),
       static_cast<uint32_t>(s.numbers.size()), line});
  s.numbers.insert(s.numbers.end(), c.numbers.begin(), c.numbers.end());
  s.packs.insert(s.packs.end(), c.packs.begin(), c.packs.end());
  // What starts as a constant is the signature's first sight of it.
  s.compiled_in.insert(
      s.compiled_in.end(), signature->compiled_in.begin(), signature->compiled_in.end());
  s.compiled_in.resize(s.numbers.size(), 0);
  note_recorded(s);
  ++counters().ops;
}

// Cuts the trace, or says when, where the mode wants it after the op that was recorded last.
void cut_after_op(Trace* trace, const OpDescription& d, const Mode& m, Lock& lock) {
  if (!m.max_ops) return;
  const auto& nodes = trace->current.nodes;
  const auto n = static_cast<int64_t>(nodes.size());
  if (m.repetitions) {
    // Once the next op comes, what only this one's caller still held is gone.
    trace->cut_due =
        trace->cut_points.after_op(nodes.back().signature->hash.lo, nodes.size(), m.max_ops);
    // Where kernels can run ops, a segment that comes once costs no program.
    if (tiers() == Tiers::Compiled && trace->varying_loops.after_op(d.hash.lo))
      trace->cut_due = kCutAtRepetition;
  } else if (n >= m.max_ops) {
    flush(trace, lock, m.max_ops == 1 ? "one op a segment" : kCutAtBound);
  }
}

}  // namespace

Recorded record_call(const OpDescription& d, const c10::IValue* args) {
  Recorded recorded;
  const size_t n = d.policies.size();
  if (in_bad_fork())
    ensure_initialized();  // raises, before any lock that another thread may have held
  // What the user chose to compute an op by is for programs.
  const bool is_tiered =
      tiers() != Tiers::Compiled && !mode().inspect && !has_chosen_implementations();
  if (is_tiered && run_on_host(d, args, recorded)) return recorded;
  if (d.has_handler()) {
    recorded.handler = d.handler;
    return recorded;
  }
  uint64_t jax_settings = 0;
  if (d.jax_settings) {  // Python's, so before the lock
    py::gil_scoped_acquire gil;
    jax_settings = callback("jax_settings")().cast<uint64_t>();
  }
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  while (true) {
    Call c;
    c.jax_settings = jax_settings;
    gather(c, d, args, n);
    const auto hash = c.hasher.digest();
    auto it = g_signatures.find(hash);
    if (it == g_signatures.end()) {
      lock.unlock();
      auto made = ask_for_signature(d, c, args, n);
      acquire(lock);
      ++counters().signatures;
      auto& held = g_signatures[hash];
      if (held) forget(std::move(made));  // another thread was first
      else held = std::move(made);
      continue;
    }
    const auto* signature = recorded.signature = it->second.get();
    if (signature->kind == Signature::Kind::Python) {
      recorded.handler = signature->plan;
      return recorded;
    }
    if (signature->kind == Signature::Kind::Resize) {
      // An out= tensor takes the shape of the result, then the call has another signature.
      lock.unlock();
      resize_outputs(*signature, args, n);
      acquire(lock);
      continue;
    }
    raise_failed(c);
    if (c.device < 0) c.device = current_device();
    Trace* trace = current_trace(c.device);
    if (trace->cut_due) {
      flush(trace, lock, trace->cut_due);
      continue;
    }
    if (settle_operands(c, trace, lock)) continue;
    if (d.random && (d.chance < 0 || args[d.chance].toDouble() != 0)) {
      add_seed(c, d, args, n);
      TORCH_INTERNAL_ASSERT(signature->packs.size() + 4 == c.packs.size());
      remember_draw(trace->current, c.draw);
    }
    append(trace, c, signature, recorded);
    if (trace->capture) {
      if (c.draw.defined()) trace->capture->add_draw(c.draw);
      return recorded;
    }
    if (is_tiered) trace->tiering.recorded(recorded.op);
    c.reads.clear();  // what is alive at a cut must not be for this call's sake
    c.writes.clear();
    if (!trace->tiering.is_recording()) cut_after_op(trace, d, mode(), lock);
    return recorded;
  }
}

void record(const OpDescription& d, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n = d.policies.size();
  if (d.takes_lists) give_lists_their_types(d, *stack);
  {
    DirectCall call(d, stack->data() + stack->size() - n, true);
    if (call && call.run(*stack)) return;
  }
  const auto* args = stack->data() + stack->size() - n;
  auto [signature, fresh, handler, op_key, done] = record_call(d, args);
  if (handler) return call_python(handler, d, op, stack);
  if (done) {
    torch::jit::drop(*stack, n);
    for (auto& r : *done) stack->push_back(std::move(r));
    return;
  }

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
  const auto& d = description_.of(op);
  const size_t n = d.policies.size();
  if (has_lazy_bits(stack->data() + stack->size() - n, n)) return record_resolved(d, op, stack);
  record(d, op, stack);
}

}  // namespace tpu

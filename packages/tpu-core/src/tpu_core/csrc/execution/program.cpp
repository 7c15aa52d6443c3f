#include "execution/program.h"

#include "execution/host_kernels.h"
#include "execution/op_by_op.h"
#include "execution/profiler.h"
#include "recorder/checks.h"
#include "recorder/threads.h"
#include "values/memory.h"
#include "values/memory_history.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace tpu {
namespace {

std::array<PyObject*, 128> g_newest{};  // per device, owned

}  // namespace

py::dict export_segment(
    const Segment& s, const Cut& c, at::ArrayRef<uint32_t> live, at::ArrayRef<uint32_t> donated,
    const std::vector<uint8_t>& compiled_in) {
  py::list nodes;
  for (const auto& n : s.nodes) {
    py::list operands, outputs;
    for (uint32_t i = 0; i < n.operands; ++i) operands.append(s.refs[n.refs + i]);
    for (uint32_t i = 0; i < n.outputs; ++i) {
      const auto slot = s.refs[n.refs + n.operands + i];
      if (slot == kNoSlot) outputs.append(py::none());
      else outputs.append(slot);
    }
    nodes.append(py::make_tuple(plan_of(n), operands, outputs, n.numbers, describe(n.line)));
  }
  py::list slots, numbers;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const auto& l = s.slots[i]->layout;
    slots.append(
        py::make_tuple(
            static_cast<bool>(s.is_input[i]), static_cast<int>(l.dtype),
            py::tuple(py::cast(std::vector<int64_t>(l.sizes.begin(), l.sizes.end())))));
  }
  for (size_t i = 0; i < s.numbers.size(); ++i) {
    py::object value;
    if (s.packs[i] == Pack::F32 || s.packs[i] == Pack::F64) {
      double d;
      std::memcpy(&d, &s.numbers[i], 8);
      value = py::float_(d);
    } else {
      value = py::int_(static_cast<int64_t>(s.numbers[i]));
    }
    numbers.append(
        py::make_tuple(static_cast<int>(s.packs[i]), static_cast<bool>(compiled_in[i]), value));
  }
  py::dict d;
  d["key"] = hex(c.key);
  d["device"] = s.device;
  d["cut"] = s.cut;
  d["nodes"] = nodes;
  d["slots"] = slots;
  d["numbers"] = numbers;
  d["live"] = live.vec();
  d["donated"] = donated.vec();
  d["on_host"] = c.on_host;
  d["is_piece"] = c.is_piece;
  return d;
}

namespace {

// Arrays of a segment's inputs, by slot. A run holds what it reads: another thread may have a value's memory
// moved to the host for a CPU kernel at any time, with which the value lets go of its array.
std::vector<py::object> input_arrays(const Segment& s) {
  std::vector<py::object> arrays(s.slots.size());
  for (size_t i = 0; i < s.slots.size(); ++i)
    if (s.is_input[i]) arrays[i] = device_array(*s.slots[i]);
  return arrays;
}

void append_packs(py::list& arguments, const Segment& s, const Program& p) {
  std::array<std::string, kPacks> bytes;
  for (size_t i = 0; i < s.numbers.size(); ++i) {
    if (p.compiled_in[i]) continue;
    const uint64_t bits = s.numbers[i];
    auto& b = bytes[static_cast<int>(s.packs[i])];
    switch (s.packs[i]) {
      case Pack::F64:
      case Pack::I64: b.append(reinterpret_cast<const char*>(&bits), 8); break;
      case Pack::F32: {
        double d;
        std::memcpy(&d, &bits, 8);
        const float f = static_cast<float>(d);
        b.append(reinterpret_cast<const char*>(&f), 4);
        break;
      }
      case Pack::I32: {
        const int32_t n = static_cast<int32_t>(static_cast<int64_t>(bits));
        b.append(reinterpret_cast<const char*>(&n), 4);
        break;
      }
    }
  }
  for (int k = 0; k < kPacks; ++k)
    if (!bytes[k].empty()) arguments.append(callback("pack")(k, py::bytes(bytes[k]), s.device));
}

// A new reference, or the Python error thrown.
py::object checked(PyObject* object) {
  if (!object) throw PythonError::current();
  return py::reinterpret_steal<py::object>(object);
}

// `arrays` are of no more use then: what is donated is gone.
py::object execute(Program& p, Segment& s, std::vector<py::object>& arrays) {
  static PyObject* consume = PyUnicode_InternFromString("consume_with_handlers");
  const bool takes_padding = p.handlers.is_none();
  py::list arguments(p.inputs.size());
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const auto slot = p.inputs[i];
    auto array = takes_padding ? arrays[slot] : without_padding(*s.slots[slot], arrays[slot]);
    PyList_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i), array.release().ptr());
  }
  if (!s.numbers.empty()) append_packs(arguments, s, p);
  auto sharded = checked(PyObject_CallOneArg(p.execute.ptr(), arguments.ptr()));
  if (takes_padding) return sharded;
  auto results = checked(PyObject_CallMethodOneArg(sharded.ptr(), consume, p.handlers.ptr()));
  return checked(PySequence_Fast(results.ptr(), "tpu: results must be a sequence"));
}

}  // namespace

py::object device_array(Value& v) {
  at::Tensor host;
  {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    if (v.array) return py::reinterpret_borrow<py::object>(v.array);
    host = v.state == State::Host
        ? v.host
        : at::zeros(v.layout.sizes, at::TensorOptions().dtype(v.layout.dtype));
  }
  const int64_t started = transfer_time();
  py::object array = callback("device_put")(py::cast(host.contiguous()), v.device);
  note_transfer(true, static_cast<int64_t>(v.nbytes), v.device, started);
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  if (v.array) return py::reinterpret_borrow<py::object>(v.array);  // another thread was first
  v.set_array(Py_NewRef(array.ptr()));
  return array;
}

py::object without_padding(Value& v, const py::object& array) {
  static const py::handle padded = callback("padded_array");
  if (reinterpret_cast<PyObject*>(Py_TYPE(array.ptr())) != padded.ptr()) return array;
  py::object exact = callback("exact")(array, v.device);
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  if (v.array == array.ptr()) v.set_array(Py_NewRef(exact.ptr()));
  return exact;
}

namespace {

void fail(Segment& s, const std::shared_ptr<const Failure>& why) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  for (auto& v : s.slots)
    if (v && v->state == State::Running) v->fail(why);
  notify_settled();
}

// Keys of segments that run in pieces, by Python's decision; guarded by the GIL. Never destroyed: static
// destructors run after the interpreter's end.
auto& g_in_pieces = *new std::unordered_set<std::string>();
constexpr size_t kMostInPieces = 4096;

// A function that gives (key, node) of the ops that no program in memory runs by themselves, while the
// segment is there.
py::object missing_function(const std::shared_ptr<const Segment*>& segment) {
  return py::cpp_function([segment] {
    TORCH_CHECK(*segment, "tpu: the request for a program is over.");
    py::list missing;
    for (const auto& [piece, node] : missing_pieces(**segment))
      missing.append(py::make_tuple(hex(piece), node));
    return missing;
  });
}

// A program for the segment, or null where it is to run in pieces: those of `parts`, else op by op.
Program* compile(
    const Segment& s, Cut& c, const std::vector<py::object>& inputs, std::vector<Part>& parts) {
  const Mode m = mode();
  const bool fits = s.nodes.size() == 1 || fits_in_pieces(s);
  const bool may_wait =
      m.providers && tiers() == Tiers::Compiled && !m.inspect && s.nodes.size() > 1 && fits;
  py::object providers = py::none();
  if (m.providers) providers = py::reinterpret_borrow<py::object>(m.providers);
  std::string key;
  if (may_wait) {
    key = hex(c.key);
    const bool known = g_in_pieces.count(key);
    if (known && !callback("program_due")(key, providers).cast<bool>()) return nullptr;
  }
  py::list arrays;
  for (auto i : c.inputs) arrays.append(inputs[i]);
  const auto asked = std::make_shared<const Segment*>(&s);
  const auto answered = c10::make_scope_exit([&] { *asked = nullptr; });
  py::object info = callback("compile")(
      export_segment(s, c, c.outputs, c.reused, c.mask), arrays, providers,
      may_wait ? missing_function(asked) : py::object(py::none()), fits);
  if (py::isinstance<py::list>(info)) {
    for (const auto& part : info) {
      const auto [begin, end, on_host] = part.cast<std::tuple<size_t, size_t, bool>>();
      parts.push_back({begin, end, on_host});
    }
    return nullptr;
  }
  if (info.is_none()) {
    if (g_in_pieces.size() >= kMostInPieces) g_in_pieces.clear();
    g_in_pieces.insert(key);
    return nullptr;
  }
  if (may_wait) g_in_pieces.erase(key);
  auto fresh = std::make_unique<Program>();
  fresh->execute = info.attr("execute");
  fresh->handlers = info.attr("handlers");
  fresh->temporaries = info.attr("temporary_bytes").cast<int64_t>();
  fresh->memory = fresh->temporaries - info.attr("aliased_bytes").cast<int64_t>();
  fresh->info = info;
  fresh->inputs.assign(c.inputs.begin(), c.inputs.end());
  fresh->outputs = c.outputs;
  fresh->donated = c.reused;
  py::object mask = info.attr("compiled_in");
  fresh->compiled_in = mask.is_none() ? c.mask : mask.cast<std::vector<uint8_t>>();
  fresh->constants = s.numbers;
  if (c.on_host && py::getattr(info, "on_host", py::bool_(false)).cast<bool>()) {
    c.own = std::move(fresh);
    return c.own.get();
  }
  return keep_program(c, std::move(fresh));
}

// What a program takes beside what is there already.
int64_t memory_needed(const Segment& s, const Program& p) {
  return std::max<int64_t>(bytes_of(s, p.outputs) + p.memory, 0);
}

constexpr size_t kMostIntermediates = 3;  // that an error names

// Raises where a program needs more than there is; nothing has been donated then.
void check_memory(const Segment& s, const Program& p) {
  if (!memory_is_checked()) return;
  const int64_t needed = memory_needed(s, p),
                live = allocated_bytes(s.device) - s.former.held_bytes();
  if (callback("check_allocation")(s.device, needed, live, false).cast<bool>()) return;
  callback("out_of_memory")(
      s.device, needed, live, p.info, largest_intermediates(s, p.outputs, kMostIntermediates));
}

// The array of a value that nothing else holds; its layout stays, for what is said of the segment.
void drop_array(Value& v) {
  v.leave_memory(true);
  v.state = State::Uninitialized;
  release_reference(std::exchange(v.array, nullptr), 0);
}

// Waits for the results and shows them, with the inputs, to the mode's inspection. What that raises
// reaches the user as it is; the results stay.
void inspect(const Segment& s, const Cut& c, const Mode& m) {
  auto arrays = [&](at::ArrayRef<uint32_t> slots) {
    py::list list;
    for (auto i : slots) list.append(device_array(*s.slots[i]));
    return list;
  };
  py::object function = py::none();
  if (m.inspect) function = py::reinterpret_borrow<py::object>(m.inspect);
  callback("inspect")(
      export_segment(s, c, c.live, c.donated, c.program->compiled_in),
      m.inspect ? arrays(c.inputs) : py::list(), arrays(c.live), function);
}

// Runs the segment's program, which is made where there is none; null where the segment is to run in
// pieces.
py::object results_of(Segment& s, Cut& c, std::vector<Part>& parts) {
  auto arrays = input_arrays(s);
  if (c.program) ++counters().hits;
  else c.program = compile(s, c, arrays, parts);
  while (c.program) {
    auto& program = *c.program;
    check_memory(s, program);
    s.former.release();
    const int64_t most = allocated_bytes(s.device) + memory_needed(s, program);
    const auto started = std::chrono::steady_clock::now();
    auto results = [&] {
      const Launch launch(s, program.info);
      return execute(program, s, arrays);
    }();
    if (!results.is_none()) {
      ++program.runs;
      program.seconds +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
      note_peak(s.device, most);
      return results;
    }
    retire_program(c);  // a size that recurs, whose program was for padded arrays
    c.program = compile(s, c, arrays, parts);
  }
  return {};
}

}  // namespace

bool is_interruption(const PythonError& error) {
  return error.is_interruption() ||
      callback("is_from_signal")(py::handle(error.value)).cast<bool>();
}

bool is_out_of_memory(const PythonError& error) {
  const py::object kind = py::module_::import("torch").attr("OutOfMemoryError");
  return PyErr_GivenExceptionMatches(error.type, kind.ptr());
}

void give_up(Segment& s, const PythonError& error) {
  fail(s, std::make_shared<const Failure>(Py_NewRef(error.value)));
}

void run(Segment& s, Cut& c) {
  if (c.failed) {
    run_others(s);
    c.failed->raise();
  }
  if (c.live.empty()) return;  // nothing that ran could be seen
  bool in_pieces = false;
  try {
    std::vector<Part> parts;
    auto results = results_of(s, c, parts);
    if (!results) {
      in_pieces = true;  // each piece keeps its own errors
      run_in_pieces(s, parts);
      return;
    }
    ++counters().executions;
    auto& program = *c.program;
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      const TemporariesRecord temporaries(s, c.live, program.temporaries);
      if (records_memory()) complete_stacks(s);
      // Inputs that nothing else holds: drop them first, so that memory statistics see them go.
      for (auto i : c.donated) drop_array(*s.slots[i]);
      size_t result = 0;
      const auto launch = next_launch();
      for (auto slot : c.live) {
        while (program.outputs[result] != slot) ++result;  // the others are read by nothing
        PyObject* array = PySequence_Fast_GET_ITEM(results.ptr(), static_cast<Py_ssize_t>(result));
        Py_INCREF(array);
        s.slots[slot]->set_array(array);
        s.slots[slot]->launch = launch;
      }
      notify_settled();
    }
    set_newest(s.device, s.slots[c.live[0]]->array);
  } catch (const PythonError& error) {
    if (is_interruption(error) || in_pieces) throw;
    const bool is_short = is_out_of_memory(error);
    // One op at a time may need less than all of them at once.
    if (is_short && memory_is_checked() && s.nodes.size() > 1 && fits_in_pieces(s))
      return run_in_pieces(s);
    if (!is_short && !c.program && s.nodes.size() > 1) {
      run_apart(s, error);
      throw;
    }
    // Every result of the segment carries the error; so do storages whose old value was donated.
    py::object mapped = callback("segment_failed")(
        py::handle(error.value), export_segment(s, c, c.live, {}, s.compiled_in));
    auto failure = std::make_shared<const Failure>(mapped.release().ptr());
    fail(s, failure);
    failure->raise();
  } catch (const std::exception& error) {
    py::object text = py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.what());
    fail(s, std::make_shared<const Failure>(text.release().ptr()));
    throw;
  }
  const Mode m = mode();
  if (m.wait || m.inspect) inspect(s, c, m);
}

PyObject* newest_array(int16_t device) { return g_newest.at(device); }

void set_newest(int16_t device, PyObject* array) {
  Py_XINCREF(array);
  Py_XDECREF(std::exchange(g_newest.at(device), array));
}

}  // namespace tpu

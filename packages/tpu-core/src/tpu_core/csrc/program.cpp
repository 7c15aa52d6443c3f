#include "program.h"

#include "memory.h"
#include "threads.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

std::array<PyObject*, 128> g_newest{};  // per device, owned

py::dict export_segment(
    const Segment& s,
    const Cut& c,
    at::ArrayRef<uint32_t> live,
    at::ArrayRef<uint32_t> donated,
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
    nodes.append(py::make_tuple(
        n.signature->plan ? n.signature->plan : py::object(py::none()), operands, outputs, n.numbers,
        describe(n.line)));
  }
  py::list slots, numbers;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const auto& l = s.slots[i]->layout;
    slots.append(py::make_tuple(
        static_cast<bool>(s.is_input[i]),
        static_cast<int>(l.dtype),
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
    numbers.append(py::make_tuple(
        static_cast<int>(s.packs[i]), static_cast<bool>(compiled_in[i]), value));
  }
  py::dict d;
  auto hex = [](const Hash128& h) {
    char text[33];
    snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)h.lo, (unsigned long long)h.hi);
    return std::string(text);
  };
  d["key"] = hex(c.key);
  d["device"] = s.device;
  d["cut"] = s.cut;
  d["nodes"] = nodes;
  d["slots"] = slots;
  d["numbers"] = numbers;
  d["live"] = live.vec();
  d["donated"] = donated.vec();
  return d;
}

void upload_host_inputs(Segment& s) {
  for (size_t i = 0; i < s.slots.size(); ++i) {
    auto& v = s.slots[i];
    if (!s.is_input[i] || v->state != State::Host) continue;
    py::object array = callback("device_put")(py::cast(v->host), s.device);
    v->set_array(array.release().ptr());
  }
}

void append_packs(py::list& arguments, const Segment& s, const Program& p) {
  std::array<std::string, kPacks> bytes;
  for (size_t i = 0; i < s.numbers.size(); ++i) {
    if (p.compiled_in[i]) continue;
    const uint64_t bits = s.numbers[i];
    auto& b = bytes[static_cast<int>(s.packs[i])];
    switch (s.packs[i]) {
      case Pack::F64:
      case Pack::I64:
        b.append(reinterpret_cast<const char*>(&bits), 8);
        break;
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

py::object execute(Program& p, Segment& s) {
  static PyObject* consume = PyUnicode_InternFromString("consume_with_handlers");
  const bool takes_padding = p.handlers.is_none();
  py::list arguments(p.inputs.size());
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    auto& value = *s.slots[p.inputs[i]];
    if (!takes_padding) drop_padding(value);
    PyObject* array = value.array;
    Py_INCREF(array);
    PyList_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i), array);
  }
  if (!s.numbers.empty()) append_packs(arguments, s, p);
  auto sharded = checked(PyObject_CallOneArg(p.execute.ptr(), arguments.ptr()));
  if (takes_padding) return sharded;
  auto results =
      checked(PyObject_CallMethodOneArg(sharded.ptr(), consume, p.handlers.ptr()));
  return checked(PySequence_Fast(results.ptr(), "tpu: results must be a sequence"));
}

}  // namespace

void drop_padding(Value& v) {
  static const py::handle padded = callback("padded_array");
  if (reinterpret_cast<PyObject*>(Py_TYPE(v.array)) != padded.ptr()) return;
  py::object array = callback("exact")(py::handle(v.array), v.device);
  v.set_array(array.release().ptr());
}

namespace {

void fail(Segment& s, std::shared_ptr<const Failure> why) {
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  for (auto& v : s.slots)
    if (v && v->state == State::Running) v->fail(why);
  notify_settled();
}

Program* compile(const Segment& s, const Cut& c) {
  py::list arrays;
  for (auto i : c.inputs) arrays.append(py::reinterpret_borrow<py::object>(s.slots[i]->array));
  py::object info = callback("compile")(
      export_segment(s, c, c.outputs, c.reused, c.mask), arrays, mode().pads);
  auto fresh = std::make_unique<Program>();
  fresh->execute = info.attr("execute");
  fresh->handlers = info.attr("handlers");
  fresh->memory = info.attr("temporary_bytes").cast<int64_t>();
  fresh->checks_memory = info.attr("checks_memory").cast<bool>();
  fresh->info = info;
  fresh->inputs.assign(c.inputs.begin(), c.inputs.end());
  fresh->outputs = c.outputs;
  fresh->donated = c.reused;
  py::object mask = info.attr("compiled_in");
  fresh->compiled_in = mask.is_none() ? c.mask : mask.cast<std::vector<uint8_t>>();
  fresh->constants = s.numbers;
  return keep_program(c, std::move(fresh));
}

void check_memory(const Segment& s, const Program& p) {
  if (!p.checks_memory) return;
  callback("check_memory")(s.device, p.info, bytes_of(s, p.outputs), allocated_bytes(s.device));
}

// The array of a value that nothing else holds; its layout stays, for what is said of the segment.
void drop_array(Value& v) {
  if (v.accounted) account(v.device, -static_cast<int64_t>(v.nbytes));
  v.accounted = false;
  v.state = State::Uninitialized;
  release_reference(std::exchange(v.array, nullptr), 0);
}

// Waits for the results and shows them, with the inputs, to the mode's inspection. What that raises
// reaches the user as it is; the results stay.
void inspect(const Segment& s, const Cut& c, const Mode& m) {
  auto arrays = [&](at::ArrayRef<uint32_t> slots) {
    py::list list;
    for (auto i : slots) list.append(py::reinterpret_borrow<py::object>(s.slots[i]->array));
    return list;
  };
  py::object function = py::none();
  if (m.inspect) function = py::reinterpret_borrow<py::object>(m.inspect);
  callback("inspect")(
      export_segment(s, c, c.live, c.donated, c.program->compiled_in),
      m.inspect ? arrays(c.inputs) : py::list(), arrays(c.live), function);
}

// The nodes [begin, end) as a segment of their own. Nodes that read a failed value fail with it and are
// left out. Its values stay in `s` as well, so that all of them are results and none is donated.
Segment part_of(const Segment& s, size_t begin, size_t end) {
  Segment part;
  part.device = s.device;
  part.cut = s.cut;
  std::unordered_map<uint32_t, uint32_t> slots;  // of s, to those of the part
  auto slot_of = [&](uint32_t slot, bool is_input) {
    const auto [it, is_new] = slots.try_emplace(slot, static_cast<uint32_t>(part.slots.size()));
    if (is_new) {
      part.slots.push_back(s.slots[slot]);
      part.is_input.push_back(is_input);
    }
    return it->second;
  };
  for (size_t i = begin; i < end; ++i) {
    const auto& n = s.nodes[i];
    const auto* refs = s.refs.data() + n.refs;
    const auto* operands_end = refs + n.operands;
    const auto failed = std::find_if(
        refs, operands_end, [&](auto slot) { return s.slots[slot]->state == State::Failed; });
    if (failed != operands_end) {
      for (uint32_t k = 0; k < n.outputs; ++k)
        if (operands_end[k] != kNoSlot) s.slots[operands_end[k]]->fail(s.slots[*failed]->failure);
      continue;
    }
    Node node = n;
    node.refs = static_cast<uint32_t>(part.refs.size());
    node.numbers = static_cast<uint32_t>(part.numbers.size());
    part.hasher.add(n.signature->hash);
    for (uint32_t k = 0; k < n.operands; ++k) {
      part.refs.push_back(slot_of(refs[k], true));
      part.hasher.add(part.refs.back());
    }
    for (uint32_t k = 0; k < n.outputs; ++k)
      part.refs.push_back(
          operands_end[k] == kNoSlot ? kNoSlot : slot_of(operands_end[k], false));
    if (!n.signature->plan) part.hasher.add(part.refs.back());  // as uninitialised memory is recorded
    const size_t last = i + 1 < s.nodes.size() ? s.nodes[i + 1].numbers : s.numbers.size();
    for (size_t k = n.numbers; k < last; ++k) {
      part.numbers.push_back(s.numbers[k]);
      part.packs.push_back(s.packs[k]);
      part.compiled_in.push_back(s.compiled_in[k]);
    }
    part.nodes.push_back(node);
  }
  return part;
}

// A segment that cannot be compiled, in parts, so that only the op at fault and what depends on it fail.
void run_apart(Segment& s, const PythonError& error) {
  const size_t n = s.nodes.size();
  std::vector<size_t> bounds{0, n / 2, n};
  // A lowering that fails says which node it is of.
  py::object known = py::getattr(py::handle(error.value), "node", py::none());
  if (!known.is_none()) {
    const auto at = known.cast<size_t>();
    bounds = {0, at, at + 1, n};
  }
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    Segment part;
    Cut c;
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      part = part_of(s, bounds[i], bounds[i + 1]);
      c = decide(part);
    }
    if (part.nodes.empty()) continue;
    try {
      run(part, c);
    } catch (const PythonError& again) {
      // The first error is the one to raise; this one is with the values that it concerns.
      if (again.is_interruption()) give_up(part, again);
    }
  }
  Lock lock(g_mutex, std::defer_lock);
  acquire(lock);
  notify_settled();
}

}  // namespace

void give_up(Segment& s, const PythonError& error) {
  fail(s, std::make_shared<const Failure>(Py_NewRef(error.value)));
}

void run(Segment& s, Cut& c) {
  if (c.failed) {
    fail(s, c.failed);
    c.failed->raise();
  }
  if (c.live.empty()) return;  // nothing that ran could be seen
  try {
    upload_host_inputs(s);
    if (c.program) ++counters().hits;
    else c.program = compile(s, c);
    check_memory(s, *c.program);
    ++counters().executions;
    auto started = std::chrono::steady_clock::now();
    auto results = execute(*c.program, s);
    if (results.is_none()) {  // a size that recurs, whose program was for padded arrays
      retire_program(c);
      c.program = compile(s, c);
      check_memory(s, *c.program);
      started = std::chrono::steady_clock::now();
      results = execute(*c.program, s);
    }
    auto& program = *c.program;
    ++program.runs;
    program.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    note_peak(s.device, program.memory);
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      // Inputs that nothing else holds: drop them first, so that memory statistics see them go.
      for (auto i : c.donated) drop_array(*s.slots[i]);
      size_t result = 0;
      for (auto slot : c.live) {
        while (program.outputs[result] != slot) ++result;  // the others are read by nothing
        PyObject* array = PySequence_Fast_GET_ITEM(results.ptr(), static_cast<Py_ssize_t>(result));
        Py_INCREF(array);
        s.slots[slot]->set_array(array);
      }
      notify_settled();
    }
    PyObject* newest = s.slots[c.live[0]]->array;
    Py_INCREF(newest);
    Py_XDECREF(std::exchange(g_newest[s.device], newest));
  } catch (const PythonError& error) {
    if (error.is_interruption()) throw;
    if (!c.program && s.nodes.size() > 1) {
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

}  // namespace tpu

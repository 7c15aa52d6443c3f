// The Python module `tpu_core._C`.
#include "bindings/enums.h"
#include "custom_ops/callable.h"
#include "custom_ops/defined_ops.h"
#include "custom_ops/list_calls.h"
#include "execution/direct_call.h"
#include "execution/host_kernels.h"
#include "execution/profiler.h"
#include "execution/program.h"
#include "execution/sparse_gradients.h"
#include "recorder/async_value.h"
#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/checks.h"
#include "recorder/record.h"
#include "recorder/tensors.h"
#include "recorder/threads.h"
#include "runtime/ended_threads.h"
#include "runtime/python.h"
#include "runtime/shared_kernels.h"
#include "runtime/source_location.h"
#include "values/device.h"
#include "values/free_memory.h"
#include "values/memory.h"
#include "values/memory_history.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pthread.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <atomic>
#include <unordered_set>
#include <utility>

extern const char* const kSources;  // written by cpp_build.py: the digest of these files

namespace tpu {
namespace {

// The results of an op, on CPU tensors, for one argument for each of the schema.
py::tuple call_host_function(const std::string& name, const py::tuple& arguments) {
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").schema();
  const auto function = host_function(name);
  TORCH_CHECK_NOT_IMPLEMENTED(function, name, " has no function of the host tier.");
  torch::jit::Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i)
    stack.push_back(torch::jit::toIValue(arguments[i], schema.arguments().at(i).type()));
  {
    const WithoutGil no_gil;
    const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
    function(ThreefryKey{}, stack);
  }
  py::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i)
    results[i] = torch::jit::toPyObject(std::move(stack[i]));
  return results;
}

std::atomic<bool> g_initialized{false};
std::atomic<bool> g_bad_fork{false};
std::atomic<int> g_device_count{-1};
PyObject* g_callbacks = nullptr;
pthread_t g_main_thread{};  // Python's, which handles signals

void before_fork() { LeafMutex::lock_all(); }
void after_fork() { LeafMutex::unlock_all(); }

void in_child() {
  after_fork();
  new (&g_mutex) StateMutex;  // a thread that is not here may have held it
  if (g_initialized) g_bad_fork = true;
}

// Registers the recorder on overloads (``ns::op.overload``); the library objects keep it there.
void register_overloads(const std::vector<std::string>& names) {
  static auto& libraries = *new std::unordered_map<std::string, std::unique_ptr<torch::Library>>();
  for (const auto& name : names) {
    const auto colons = name.find("::");
    auto& library = libraries[name.substr(0, colons)];
    if (!library)
      library = std::make_unique<torch::Library>(
          torch::Library::IMPL, name.substr(0, colons), c10::DispatchKey::PrivateUse1, __FILE__,
          __LINE__);
    const auto op = c10::Dispatcher::singleton().findOp(torch::jit::parseName(name));
    library->impl(
        name.c_str() + colons + 2,
        op && op->hasSchema()
            ? kernel_of(*op)
            : torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>()));
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  record(*describe_op(op), op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

py::object value_array(const at::Tensor& t, const char* reason) {
  ensure_initialized();
  return array_of_value(ValuePtr(cell_of(t)->value), reason);
}

at::Tensor from_array(py::object array, const at::Tensor& like, bool shared) {
  auto* cell = cell_of(like);
  Layout layout{
      like.scalar_type(), Dims(like.sizes().begin(), like.sizes().end()),
      Dims(like.strides().begin(), like.strides().end())};
  auto value = make_value(layout, like.storage().nbytes(), like.device().index(), State::Pending);
  value->set_array(array.release().ptr());
  value->shared = shared;
  WithoutGil no_gil;
  Lock lock(g_mutex);
  cell->value = std::move(value);
  return like;
}

const char* state_name(const at::Tensor& t) {
  switch (cell_of(t)->value->state) {
    case State::Uninitialized: return "uninitialized";
    case State::Host: return "host";
    case State::Pending: return "pending";
    case State::Running: return "running";
    case State::Ready: return "ready";
    case State::Failed: return "failed";
  }
  return "?";
}

py::object mode_tuple(const Mode& m) {
  const auto object = [](PyObject* o) {
    return o ? py::reinterpret_borrow<py::object>(o) : py::object(py::none());
  };
  return py::make_tuple(m.max_ops, m.wait, object(m.inspect), m.repetitions, object(m.providers));
}

Mode mode_of(const py::tuple& t) {
  const auto kept = [](py::object o) { return o.is_none() ? nullptr : o.release().ptr(); };
  return {t[0].cast<int64_t>(), t[1].cast<bool>(), kept(t[2]), t[3].cast<bool>(), kept(t[4])};
}

// Gives every value that is on a device the array that `replacement` makes of its present one. Nothing may
// be recorded or running.
void replace_arrays(const py::object& replacement) {
  std::unordered_set<const Value*> seen;
  for (const auto& value : live_values()) {
    if (!value || value->state != State::Ready || !seen.insert(value.get()).second) continue;
    py::object array = Function{replacement}(py::handle(value->array), value->device);
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    value->set_array(array.release().ptr());
  }
}

constexpr CoreFunctions kCoreFunctions{
    CoreFunctions::kVersion, &handles_signals, [](PyObject* object) { release_reference(object); }};

}  // namespace

Function callback(const char* name) {
  PyObject* f = g_callbacks ? PyDict_GetItemString(g_callbacks, name) : nullptr;
  TORCH_CHECK(f, "tpu: the runtime has no function '", name, "'; tpu_core is damaged.");
  return Function(f);
}

void set_callbacks(py::dict table) {
  Py_XDECREF(g_callbacks);
  g_callbacks = table.release().ptr();
}

bool handles_signals() { return pthread_equal(pthread_self(), g_main_thread); }

bool is_initialized() { return g_initialized; }
bool in_bad_fork() { return g_bad_fork; }

void ensure_initialized() {
  if (g_initialized && !g_bad_fork) return;
  py::gil_scoped_acquire gil;
  // Raises ForkedProcessError in a forked child of a process that used the device.
  const py::object initialize = py::module_::import("tpu_core.runtime").attr("initialize");
  Function{initialize}();
  g_initialized = true;
}

int16_t device_count() {
  int n = g_device_count;
  if (n < 0) {
    py::gil_scoped_acquire gil;
    n = py::module_::import("tpu_core.runtime").attr("device_count")().cast<int>();
    g_device_count = n;
  }
  return static_cast<int16_t>(n);
}

}  // namespace tpu

PYBIND11_MODULE(_C, m) {
  using namespace tpu;
  g_core = &kCoreFunctions;
  m.attr("FUNCTIONS") =
      py::capsule(static_cast<const void*>(&kCoreFunctions), CoreFunctions::kName);
  m.attr("SOURCES") = kSources;
  m.doc() = "The C++ part of tpu_core: device hooks, storages, dispatch and traces.";
  g_main_thread = (pthread_t)py::module_::import("threading")
                      .attr("main_thread")()
                      .attr("ident")
                      .cast<unsigned long>();
  pthread_atfork(before_fork, after_fork, in_child);
  park_ended_threads();
  m.def("register_device", &register_device);
  m.def("register_overloads", &register_overloads);
  m.def("share_kernels", &share_kernels);
  m.def("register_sparse_gradients", &register_sparse_gradients);
  m.def("register_differentiable", &register_differentiable);
  m.def("register_not_differentiable", &register_not_differentiable);
  m.def("op_caller", &op_caller);
  m.def("call_through", &call_through);
  m.def("list_caller", &list_caller);
  m.def("set_callbacks", &set_callbacks);
  m.def("set_internal_prefixes", [](py::tuple t) { set_internal_prefixes(t.ptr()); });
  m.def("is_initialized", &is_initialized);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("current_device", &current_device);
  m.def("set_current_device", &set_current_device);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("is_capturing", [](int device) { return is_capturing(static_cast<int16_t>(device)); });
  m.def("refuse_in_capture", [](int device, const char* what) {
    refuse_in_capture(static_cast<int16_t>(device), what);
  });
  m.def("next_seed", [](const at::Generator& generator) {
    // The numbers would be arguments of an op, the same in each replay.
    refuse_in_capture(
        static_cast<int16_t>(generator.device().index()), "A random op of a compiled graph");
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    return next_seed(generator, -1);
  });
  m.def("flush", [](const char* cut) { flush_current(cut); }, py::arg("cut") = "explicit cut");
  m.def("wait_for_autograd", &wait_for_autograd);
  m.def("flush_all", [](int device, const char* cut) { flush_all(device, cut); });
  m.def("set_default_mode", [](const py::tuple& t) { set_default_mode(mode_of(t)); });
  m.def("set_thread_mode", [](std::optional<py::tuple> t) {
    set_thread_mode(t ? std::optional<Mode>(mode_of(*t)) : std::nullopt);
  });
  m.def("thread_mode", []() -> py::object {
    auto t = thread_mode();
    if (!t) return py::none();
    return mode_tuple(*t);
  });
  // Keys of tpu_core.metrics.COUNTERS.
  m.def("counters", [] {
    const auto& c = counters();
    py::dict d;
    d["ops"] = uint64_t{c.ops};
    d["segments"] = uint64_t{c.segments};
    d["executions"] = uint64_t{c.executions};
    d["cache_hits_memory"] = uint64_t{c.hits};
    d["substitutions"] = uint64_t{c.substitutions};
    d["signatures"] = uint64_t{c.signatures};
    d["pieces"] = uint64_t{c.pieces};
    d["host_ops"] = uint64_t{c.host_ops};
    d["promotions"] = uint64_t{tier_counters().promotions};
    d["demotions"] = uint64_t{tier_counters().demotions};
    const auto [uploads, bytes] = host_to_device_counts();
    d["h2d_count"] = uploads;
    d["h2d_bytes"] = bytes;
    return d;
  });
  m.def("newest_array", [](int device) -> py::object {
    PyObject* array = newest_array(static_cast<int16_t>(device));
    if (!array) return py::none();
    return py::reinterpret_borrow<py::object>(array);
  });
  m.def("set_newest", [](int device, py::handle array) {
    set_newest(static_cast<int16_t>(device), array.is_none() ? nullptr : array.ptr());
  });
  m.def("clear_programs", &clear_programs);
  m.def("program_runs", &program_runs);
  m.def("drain_references", &drain_references);
  m.def("ignoring_arguments", [](const py::object& function) {
    return py::cpp_function([function](const py::args&) {
      if (!g_bad_fork) function();  // XLA's threads may have held its locks
    });
  });
  m.def("allocated_bytes", &allocated_bytes);
  m.def("note_out_of_memory", &note_out_of_memory);
  m.def("set_memory_checked", &set_memory_checked);
  m.def("memory_is_checked", &memory_is_checked);
  m.def("add_undo", [](int device, py::handle f) {
    add_undo(static_cast<int16_t>(device), f.ptr());
  });
  m.def("replace_arrays", &replace_arrays);
  m.def("value_array", &value_array);
  m.def("mark_shared", [](const at::Tensor& t) { cell_of(t)->value->shared = true; });
  m.def("is_whole", &is_whole);
  // The 0-d tensor that PyTorch makes of the number in `x + 2`.
  m.def("wrapped_number", [](py::handle n) {
    return at::native::wrapped_scalar_tensor(
        torch::jit::toIValue(n, c10::NumberType::get()).toScalar());
  });
  m.def("call_host_function", &call_host_function);
  m.def("own_value", [](const at::Tensor& t) {
    WithoutGil no_gil;
    return own_value(t);
  });
  m.def("from_array", &from_array);
  m.def("state", &state_name);
  m.def("read_tensor", [](const at::Tensor& t, const char* reason) {
    at::Tensor host;
    {
      WithoutGil no_gil;
      host = read_tensor(t, reason);
    }
    return host;
  });
  m.def("event_elapsed", [](py::handle start, py::handle end) {
    return reinterpret_cast<THPEvent*>(start.ptr())
        ->event.elapsedTime(reinterpret_cast<THPEvent*>(end.ptr())->event);
  });
  m.def("set_thread_precision", &set_thread_precision);
  m.def("set_implementations", &set_implementations);
  register_enums(m);
  register_promises(m);
  register_profiler(m);
  m.def("set_checks", &set_checks);
  m.def("set_donates", &set_donates);
  m.def("checks", &checks);
  m.def("launches", &launches);
  m.def("raise_checks", [](int device, uint64_t launch) {
    raise_checks(static_cast<int16_t>(device), launch);
  });
  m.def("set_patience", &set_patience);
  m.def("limit_free_memory", &limit_free_memory);
  m.def("note_compile", &note_compile);
  m.def("set_tiers", [](int tiers) { set_tiers(static_cast<Tiers>(tiers)); });
  register_memory_history(m);
  m.def("user_line", [] {
    Line line;
    {
      WithoutGil no_gil;
      Lock lock(g_mutex);
      line = user_line();
    }
    return describe(line);
  });
}

// Calls from C++ into Python that are safe on every thread, at the interpreter's end too. The sources of tpu-core
// and extensions of other packages include it; the latter call `tpu::import_core` in their PYBIND11_MODULE.
//
// Nothing links against tpu-core's shared object: the functions that need its state are in a table,
// the capsule `tpu_core._C.FUNCTIONS`.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cxxabi.h>
#include <unistd.h>

#include <utility>

namespace tpu {

namespace py = pybind11;

struct CoreFunctions {
  static constexpr int kVersion = 1;
  static constexpr const char* kName = "tpu_core._C.FUNCTIONS";

  int version;  // of this struct; a change of what follows is another one
  // Whether signals are handled on this thread, Python's first: it looks for them while it waits (Ctrl-C).
  bool (*handles_signals)();
  // Ends a reference on a thread that may not ask for the GIL: one that holds it does so later.
  void (*release_reference)(PyObject* object);
};

// Set before anything else of this header is used.
inline const CoreFunctions* g_core = nullptr;

// Raises ImportError where the installed tpu-core has another table. Needs the GIL.
inline void import_core() {
  const py::object capsule = py::module_::import("tpu_core._C").attr("FUNCTIONS");
  const void* found = PyCapsule_GetPointer(capsule.ptr(), CoreFunctions::kName);
  if (!found) throw py::error_already_set();
  const auto* functions = static_cast<const CoreFunctions*>(found);
  if (functions->version != CoreFunctions::kVersion)
    throw py::import_error("it was built against the headers of another release of tpu-core");
  g_core = functions;
}

// Whether a thread that asks for the GIL now is ended, unless it is the one that ends the interpreter.
inline bool interpreter_ends() {
  if (!Py_IsInitialized()) return true;
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Stops this thread until the process is gone.
[[noreturn]] inline void park() {
  while (true) pause();
}

// Releases the GIL, where it is held, for a scope that may block.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (!state_) return;
    // Python ends a thread that asks for the GIL while the interpreter ends, and with C++ on its stack the
    // process aborts: the thread stays here until the process is gone.
    if (interpreter_ends() && !g_core->handles_signals()) park();
    PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// A Python exception on its way through C++. Unlike pybind11's and torch's own it may be destroyed by any
// thread at any time: autograd's threads share the error of a backward and drop it when they please, at
// the interpreter's end too, where a thread that asks for the GIL is ended and takes the process with it.
struct PythonError final : python_error {
  // The exception that is set in the interpreter, taken from it. Needs the GIL.
  static PythonError current() {
    PythonError error;
    PyErr_Fetch(&error.type, &error.value, &error.traceback);
    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    if (error.traceback) PyException_SetTraceback(error.value, error.traceback);
    error.build_message();
    return error;
  }
  PythonError(PythonError&&) = default;
  // Whether its class says that it is about nothing that it stopped (Ctrl-C, a compile that is forbidden).
  // Needs the GIL.
  bool is_interruption() const {
    return !PyErr_GivenExceptionMatches(type, PyExc_Exception) ||
        PyObject_HasAttrString(value, "is_interruption");
  }
  ~PythonError() override {
    for (auto** object : {&type, &value, &traceback})
      g_core->release_reference(std::exchange(*object, nullptr));
  }

 private:
  PythonError() = default;
};

// Turns __torch_function__ of modes and subclasses off in this thread.
class WithoutTorchFunction {
 public:
  WithoutTorchFunction() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~WithoutTorchFunction() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
  WithoutTorchFunction(const WithoutTorchFunction&) = delete;
  WithoutTorchFunction& operator=(const WithoutTorchFunction&) = delete;

 private:
  at::impl::TorchFunctionDisabledState before_;
};

// A Python function whose exceptions are thrown as PythonError; the GIL must be held. It runs as a kernel of
// ATen does, without the user's torch function modes: torch.set_default_device, which is one, would move the
// tensors that it makes.
class Function {
 public:
  explicit Function(py::handle function) : function_(function) {}
  operator py::handle() const { return function_; }

  template <typename... Args>
  py::object operator()(Args&&... args) const {
    const WithoutTorchFunction guard;
    const py::tuple arguments = py::make_tuple(std::forward<Args>(args)...);
    PyObject* result = nullptr;
    // Python may end this thread in the call, by unwinding its stack. Nothing within `try` has a destructor, and
    // what is above on the stack needs the GIL to be destroyed.
    try {
      result = PyObject_CallObject(function_.ptr(), arguments.ptr());
    } catch (abi::__forced_unwind&) {
      park();
    }
    if (!result) throw PythonError::current();
    return py::reinterpret_steal<py::object>(result);
  }

 private:
  py::handle function_;
};

// A reference to a Python object that any thread may end.
class SharedObject {
 public:
  explicit SharedObject(py::object object) : object_(object.release().ptr()) {}
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;
  ~SharedObject() { g_core->release_reference(object_); }

  // Calls a method. Needs the GIL.
  template <typename... Args>
  py::object call(const char* method, Args&&... args) const {
    const py::object bound = py::handle(object_).attr(method);
    return Function{bound}(std::forward<Args>(args)...);
  }

 private:
  PyObject* object_;
};

}  // namespace tpu

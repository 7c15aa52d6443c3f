// Calls from the extension into Python, all through one table of callbacks.
#pragma once

#include "runtime/ended_threads.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cxxabi.h>

namespace tpu {

namespace py = pybind11;

// A Python exception on its way through C++. Unlike pybind11's and torch's own it may be destroyed by any
// thread at any time: autograd's threads share the error of a backward and drop it when they please, at
// the interpreter's end too, where a thread that asks for the GIL is ended and takes the process with it.
struct PythonError final : python_error {
  // The exception that is set in the interpreter, taken from it. Needs the GIL.
  static PythonError current();
  PythonError(PythonError&&) = default;
  // Whether it says nothing about the work that it stopped (Ctrl-C, a compile that is forbidden), which
  // then stays to be done. Needs the GIL.
  bool is_interruption() const;
  ~PythonError() override;

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
    try {
      return function_(std::forward<Args>(args)...);
    } catch (py::error_already_set& error) {
      error.restore();
      throw PythonError::current();
    } catch (abi::__forced_unwind&) {
      park();  // Python ends this thread; what is above on the stack needs the GIL to be destroyed
    }
  }

 private:
  py::handle function_;
};

// The function registered under `name` by `tpu_core.runtime`.
Function callback(const char* name);
void set_callbacks(py::dict table);

// Starts the runtime (`tpu_core.runtime.initialize`) on the device's first use. Raises in a forked child.
void ensure_initialized();
bool is_initialized();
bool in_bad_fork();

int16_t current_device();
void set_current_device(int16_t device);
int16_t device_count();

}  // namespace tpu

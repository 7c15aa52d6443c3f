// Python callables made of C++ functions that take their arguments without pybind11's conversions.
#pragma once

#include "runtime/python.h"

#include <functional>

namespace tpu {

// What a call is given, as `vectorcall` has it.
struct PythonCall {
  PyObject* const* args;
  size_t nargsf;
  PyObject* kwnames;

  size_t count() const { return static_cast<size_t>(PyVectorcall_NARGS(nargsf)); }
  PyObject* pass_on(py::handle other) const {
    return PyObject_Vectorcall(other.ptr(), args, nargsf, kwnames);
  }
};

// A Python callable; what `body` throws becomes a Python exception, as in PyTorch.
py::object make_callable(std::function<PyObject*(const PythonCall&)> body);

// Has objects of a Python class called as their attribute ``_call`` is, without a frame of Python's own.
// The class keeps its ``__call__`` for who asks for it by name: Dynamo, which traces it.
void call_through(py::type type);

}  // namespace tpu

#include "custom_ops/callable.h"

#include <utility>

namespace tpu {
namespace {

struct CallableObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::function<PyObject*(const PythonCall&)>* body;
};

PyObject* call_body(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  HANDLE_TH_ERRORS
  return (*reinterpret_cast<CallableObject*>(self)->body)({args, nargsf, kwnames});
  END_HANDLE_TH_ERRORS
}

void free_callable(PyObject* self) {
  delete reinterpret_cast<CallableObject*>(self)->body;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject* callable_type() {
  static PyTypeObject type = [] {
    PyTypeObject t{PyVarObject_HEAD_INIT(nullptr, 0)};
    t.tp_name = "tpu_core._C.Callable";
    t.tp_basicsize = sizeof(CallableObject);
    t.tp_dealloc = free_callable;
    t.tp_vectorcall_offset = offsetof(CallableObject, vectorcall);
    t.tp_call = PyVectorcall_Call;
    t.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    return t;
  }();
  static const bool ready = PyType_Ready(&type) == 0;
  TORCH_CHECK(ready, "tpu: the type of callables could not be made.");
  return &type;
}

PyObject* call_attribute(PyObject* self, PyObject* args, PyObject* kwargs) {
  static PyObject* name = PyUnicode_InternFromString("_call");
  PyObject* target = PyObject_GetAttr(self, name);
  if (!target) return nullptr;
  PyObject* result = PyObject_Call(target, args, kwargs);
  Py_DECREF(target);
  return result;
}

}  // namespace

void call_through(py::type type) {
  reinterpret_cast<PyTypeObject*>(type.ptr())->tp_call = call_attribute;
}

py::object make_callable(std::function<PyObject*(const PythonCall&)> body) {
  auto* callable = PyObject_New(CallableObject, callable_type());
  if (!callable) throw py::error_already_set();
  callable->vectorcall = call_body;
  callable->body = new std::function<PyObject*(const PythonCall&)>(std::move(body));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(callable));
}

}  // namespace tpu

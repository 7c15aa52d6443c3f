"""A C++ extension of another package: built by its ``setup.py``, loaded, refused when stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interpreter import clean, run
from tpu_core.cpp_extension import HEADERS, Extension, minor

SETUP = """
import importlib.util, pathlib, runpy
(folder,) = importlib.util.find_spec("tpu_core").submodule_search_locations
setup = runpy.run_path(f"{folder}/cpp_build.py")["setup"]
setup(pathlib.Path(__file__).parent, "acme_cpp")
"""
PROJECT = """
[project]
name = "acme-cpp"
version = "1.0"

[tool.setuptools.packages.find]
where = ["src"]
"""
MODULE = """
from pathlib import Path
from tpu_core.cpp_extension import Extension
Extension("acme_cpp", Path(__file__).parent).load()
"""
SOURCE = """
#include <tpu_core/python.h>

#include <exception>
#include <memory>
#include <thread>

namespace py = pybind11;

// Calls a method on a thread that ends before its exception is looked at and dropped.
void call_on_thread(py::object object, const char* method) {
  std::exception_ptr error;
  auto shared = std::make_shared<tpu::SharedObject>(std::move(object));
  {
    const tpu::WithoutGil no_gil;
    std::thread([&, shared = std::move(shared)] {
      py::gil_scoped_acquire gil;
      try {
        shared->call(method);
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
  }
  try {
    if (error) std::rethrow_exception(error);
  } catch (python_error& e) {
    e.restore();
    throw py::error_already_set();
  }
}

PYBIND11_MODULE(_C, m) {
  tpu::import_core();
  m.def("call_on_thread", &call_on_thread);
}
"""
FILES = {
    "setup.py": SETUP,
    "pyproject.toml": PROJECT,
    "src/acme_cpp/__init__.py": "",
    "src/acme_cpp/_C.py": MODULE,
    "src/acme_cpp/csrc/module.cpp": SOURCE,
}
USE = """
import sys
sys.path.insert(0, {path!r})
import torch
from acme_cpp import _C

class Error(Exception):
    pass

class Object:
    def fail(self):
        raise Error("from a thread", torch.ones(2, device="tpu").sum().item())

with torch.device("tpu"):  # a torch function mode
    try:
        _C.call_on_thread(Object(), "fail")
    except Error as error:
        print(error.args)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with an extension, built in place."""
    folder = tmp_path_factory.mktemp("acme")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_exceptions_keep_their_class_across_threads(project: Path) -> None:
    assert clean(USE.format(path=str(project / "src"))) == "('from a thread', 2.0)\n"


def test_a_build_is_of_sources_and_headers(project: Path, monkeypatch) -> None:
    extension = Extension("acme_cpp", project / "src" / "acme_cpp")
    (build,) = extension.builds().values()
    assert build == extension.build_of(minor(torch.__version__))
    assert extension.is_current(build) and extension.problem() is None
    source = extension.csrc / "module.cpp"
    text = source.read_text()
    source.write_text(text + "// edited")
    assert not extension.is_current(build)
    used = run(USE.format(path=str(project / "src")))
    assert "[TPU1002] The extension of acme_cpp was built from other sources" in used.stderr
    source.write_text(text)
    assert extension.is_current(build)
    monkeypatch.setitem(Extension.sources_digest.__globals__, "HEADERS", HEADERS / "none")
    assert not extension.is_current(build)


def test_a_wheel_has_no_sources(tmp_path: Path) -> None:
    """Without sources beside it a build is taken as it is."""
    assert Extension("acme_cpp", tmp_path).is_current(tmp_path / "_C.so")

"""Build of the C++ extension ``tpu_core._C``: see ``src/tpu_core/cpp_build.py``."""

from __future__ import annotations

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Layers of the sources, the lowest first: those in parentheses are one translation unit.
UNITS = (
    ("runtime", "values"),
    ("recorder",),
    ("execution",),
    ("custom_ops", "bindings"),
)

setup = runpy.run_path(str(HERE / "src" / "tpu_core" / "cpp_build.py"))["setup"]

import torch  # noqa: E402 - after cpp_build, which keeps the device from being loaded

KINETO = Path(torch.__file__).parent / "include" / "kineto"  # of the profiler
setup(HERE, "tpu_core", units=UNITS, include_dirs=[KINETO])

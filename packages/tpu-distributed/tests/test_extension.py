"""The C++ extension of this package: loaded with the first group, refused where it does not fit."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import spawn

GROUP = """
import sys, torch.distributed as dist
from tpu_core.errors import TpuError
assert "tpu_distributed._C" not in sys.modules
try:
    dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
    print(sys.modules["tpu_distributed._C"].__file__)
except TpuError as error:
    print(error)
"""
EXTENSION = """
from tpu_core.cpp_extension import Extension

def of_this_package(name, replacement):
    own = getattr(Extension, name)
    setattr(Extension, name, lambda self: replacement if "dist" in self.package else own(self))
"""
ANOTHER_TABLE = """
import ctypes
from tpu_core import _C

new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
table, name = (ctypes.c_int * 16)(99), ctypes.create_string_buffer(b"tpu_core._C.FUNCTIONS")
_C.FUNCTIONS = new(ctypes.addressof(table), ctypes.cast(name, ctypes.c_char_p), None)
"""


def group(before: str) -> str:
    code = spawn.REGISTER + EXTENSION + textwrap.dedent(before) + GROUP
    return subprocess.run(
        [sys.executable, "-c", code],
        env=spawn.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    ).stdout


def test_the_first_group_loads_it() -> None:
    assert "/tpu_distributed/_extensions/torch_2_" in group("")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            'of_this_package("builds", {"2.9": None})',
            "[TPU1002] tpu_distributed was built for torch 2.9, but torch 2.",
        ),
        (
            'of_this_package("sources_digest", "of a later checkout")',
            "[TPU1002] The extension of tpu_distributed was built from other sources than those",
        ),
        (
            """
            of_this_package("builds", {})
            Extension.build_of = lambda self, minor: self.folder / "torch_9_9" / "_C.so"
            """,
            "there is no _extensions/torch_9_9/_C.so",
        ),
        (
            ANOTHER_TABLE,
            "it was built against the headers of another release of tpu-core",
        ),
        (
            'from tpu_core.stub_module import stand_down; stand_down("another was first")',
            "[TPU1003] tpu_core is not active: another was first.",
        ),
    ],
    ids=["another torch", "other sources", "no build", "another tpu-core", "no device"],
)
def test_one_that_does_not_fit_is_refused(before: str, said: str) -> None:
    printed = group(before)
    assert said in printed and "What to do: " in printed

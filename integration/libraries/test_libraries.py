"""Libraries of others compute on the device what they compute on the CPU: `nox -s libraries`."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

MODULES = ("images", "graphs", "probability", "language", "metrics")
PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "libraries.md"
# Relative. Kernels that PyTorch composes on one device and has on the other; XLA in compiled ones.
ROUNDING = 1e-4

Program = Callable[[str], Iterator[tuple[str, Tensor]]]


def _programs() -> Iterator[Program]:
    for name in MODULES:
        module = importlib.import_module(f"libraries.{name}")
        yield from (f for _, f in inspect.getmembers(module, inspect.isgeneratorfunction))


def _results(program: Program, device: str) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in program(device)}


@pytest.mark.parametrize("program", list(_programs()), ids=lambda p: p.__name__)
def test_results_are_those_of_the_cpu(program: Program) -> None:
    expected, found = _results(program, "cpu"), _results(program, "tpu")
    assert list(found) == list(expected)
    for name, value in expected.items():
        scale = value.abs().max().item() if value.numel() and value.is_floating_point() else 1
        bounds = {"rtol": ROUNDING, "atol": ROUNDING * scale}
        torch.testing.assert_close(
            found[name], value, **bounds, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_page_on_libraries_prints_what_it_shows() -> None:
    text = PAGE.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == printed

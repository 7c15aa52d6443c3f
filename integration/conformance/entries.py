"""Entries of PyTorch's databases: one check of one op, module or optimizer with one dtype.

An entry's name is ``part/op/dtype``: ``forward/add/float32``, ``module/nn.LSTM/float64``.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

from opinfo import op_db

FILE = Path(__file__).with_name("expected.toml")
OP_PARTS = ("forward", "gradients", "gradgrad", "forward_mode", "out", "inplace", "errors")
PARTS = (*OP_PARTS, "module", "module_errors", "optimizer", "optimizer_errors")
# Derivatives of derivatives lose too many digits in float32 to tell a wrong formula from rounding.
GRADGRAD = (torch.float64, torch.complex128)


class Entry(NamedTuple):
    part: str
    name: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.part}/{self.name}/{str(self.dtype).removeprefix('torch.')}"


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def module_name(info: Any) -> str:
    return info.name


def optimizer_name(info: Any) -> str:
    return info.optim_cls.__name__


# jiterator: kernels in CUDA's language, which the CPU refuses.
OPS = {op_name(op): op for op in op_db if not op.name.startswith("jiterator")}
MODULES = {module_name(info): info for info in module_db}
OPTIMIZERS = {optimizer_name(info): info for info in optim_db}


def _op_entries(name: str, op: Any) -> Iterator[Entry]:
    forward = op.supported_dtypes("cpu")
    backward = op.supported_backward_dtypes("cpu") if op.supports_autograd else set()
    dtypes = {
        "forward": forward,
        "gradients": backward,
        "gradgrad": backward & set(GRADGRAD) if op.supports_gradgrad else set(),
        "forward_mode": backward if op.supports_forward_ad else set(),
        "out": forward if op.supports_out else set(),
        "inplace": forward if op.inplace_variant is not None else set(),
        "errors": {torch.float32} if op.error_inputs_func is not None else set(),
    }
    for part in OP_PARTS:
        for dtype in sorted(dtypes[part], key=str):
            yield Entry(part, name, dtype)


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry of the databases that the CPU has."""
    found: list[Entry] = []
    for name, op in OPS.items():
        found.extend(_op_entries(name, op))
    for name, info in MODULES.items():
        found.extend(Entry("module", name, d) for d in info.supported_dtypes("cpu"))
        if info.module_error_inputs_func is not None:
            found.append(Entry("module_errors", name, torch.float32))
    for name, info in OPTIMIZERS.items():
        found.append(Entry("optimizer", name, torch.float32))
        found.append(Entry("optimizer", name, torch.float64))
        if info.optim_error_inputs_func is not None:
            found.append(Entry("optimizer_errors", name, torch.float32))
    return tuple(sorted(found, key=lambda e: (PARTS.index(e.part), e.name, str(e.dtype))))


@cache
def data() -> dict[str, Any]:
    """The data file: what is expected to differ, and what cannot be compared by value."""
    return tomllib.loads(FILE.read_text())


def expectation(entry: Entry | str) -> dict[str, str] | None:
    """What the data file says of an entry: ``reason`` and perhaps ``raises``, or None."""
    name = str(entry)
    found = (i for i in data()["expected"] if fnmatch.fnmatchcase(name, i["entry"]))
    return next(found, None)


def verdict(result: dict[str, Any]) -> str:
    """``passed``, ``expected``, ``failed`` or ``shrinks``: a listed entry that passes.

    Entries that are listed with ``raises`` may pass (ops that compute nothing) or raise an error
    with that code; any other outcome is a failure. Entries with ``rounding`` may pass as well.
    """
    passed = result["outcome"] == "passed"
    item = expectation(result["entry"])
    if item is None:
        return "passed" if passed else "failed"
    if "raises" in item:
        raised = result["outcome"] == "raised" and item["raises"] in result["detail"]
        return "passed" if passed else "expected" if raised else "failed"
    if passed:
        return "passed" if item.get("rounding") else "shrinks"
    return "expected"


def is_listed(what: str, name: str) -> bool:
    """Whether an op, module or optimizer is in a list of the data file."""
    return name in data()[what]["names"]

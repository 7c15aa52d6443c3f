"""The device contract, row by row: the names on torch.tpu and the behaviour behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from device_contract import (
    accelerator,
    amp,
    devices,
    profiling,
    registration,
    rng,
    serialization,
    training,
)
from tpu_core.conformance import Requirement, contract_page, device_contract, parse

CHECKS: dict[str, Callable[..., None]] = {
    name: function
    for module in (accelerator, amp, devices, profiling, registration, rng, serialization, training)
    for name, function in vars(module).items()
    if name.startswith("check_")
}
ROWS = device_contract().requirements
DONE = [row for row in ROWS if row.status == "yes" and row.package == "tpu-core"]


@pytest.fixture(autouse=True)
def same_random_state():
    """Each check starts from the same random state and leaves none behind."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("row", [r for r in DONE if r.names], ids=lambda r: r.id)
def test_names_exist_on_the_module(row: Requirement) -> None:
    missing = [name for name in row.names if not hasattr(torch.tpu, name)]
    assert not missing


OF_CPU = {
    "check_profiler": "PyTorch's profiler holds CUPTI, which XLA's would need",
    "check_pin_memory": "beside a CUDA device PyTorch pins memory for that one",
}


def _marks(check: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.of_cpu(reason=OF_CPU[check])] if check in OF_CPU else []


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(r, id=f"{r.id}-{r.feature}", marks=_marks(r.check))
        for r in DONE
        if r.check is not None
    ],
)
def test_behaviour(row: Requirement, tmp_path: Path) -> None:
    check = CHECKS[row.check]
    check(**({"tmp_path": tmp_path} if "tmp_path" in inspect.signature(check).parameters else {}))


def test_every_row_that_is_there_has_a_check_and_every_check_a_row() -> None:
    assert [row.id for row in DONE if row.check is None] == []
    assert {row.check for row in DONE} == set(CHECKS)


def test_groups_of_this_package_lack_nothing_expected() -> None:
    lacking = [r.id for r in ROWS if r.status != "yes" and r.priority != "P2"]
    assert [id for id in lacking if id[0] in "RADGMSLKOTXP"] == []


def test_page_lists_every_row() -> None:
    page = contract_page()
    assert all(f"| {row.id} |" in page for row in ROWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('status = "maybe"', "row R1: 'maybe' is none of yes, not yet."),
        ('priority = "P9"', "row R1: 'P9' is none of P0, P1, P2."),
        ('id = "Z1"', "row Z1: group 'Z' is none of R."),
        ("colour = 1", "row R1: .*colour"),
    ],
)
def test_a_mistake_in_the_table_is_named(change: str, message: str) -> None:
    row = {"id": '"R1"', "feature": '"f"', "requirement": '"r"', "priority": '"P0"'}
    row["status"] = '"yes"'
    key, value = change.split(" = ")
    row[key] = value
    lines = "\n".join(f"{k} = {v}" for k, v in row.items())
    with pytest.raises(ValueError, match=message):
        parse(f'[groups]\nR = "Registration"\n[[requirement]]\n{lines}\n')

"""What the programs of sub-groups span, and how all ranks' groups are found."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpu_core.config import override
from tpu_core.errors import ProcessGroupError
from tpu_distributed import slices
from tpu_distributed.stablehlo import ProgramWriter

RECORD: Any = SimpleNamespace(call="all_reduce sum float32[4] in groups of 2", line="train.py:7")


def devices(kind: str, count: int) -> list[Any]:
    return [SimpleNamespace(device_kind=kind, id=i) for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("TPU v5 lite", 64, True),
        ("TPU v6 lite", 16, True),
        ("TPU v5 lite", 8, False),
        ("TPU v5", 512, False),
        ("TPU v4", 64, False),
        ("cpu", 16, False),
    ],
)
def test_slices_whose_routing_is_limited(kind: str, count: int, expected: bool) -> None:
    assert slices.must_span(devices(kind, count)) is expected
    for setting, wanted in (("slice", True), ("group", False)):
        with override(collectives_span=setting):
            assert slices.must_span(devices(kind, count)) is wanted


def payloads(*rows: tuple[int, int]) -> list[np.ndarray[Any, Any]]:
    return [np.array(row, np.int64) for row in rows]


def test_groups_are_found_by_their_leaders() -> None:
    found = slices.groups_of(payloads((0, 0), (1, 0), (0, 1), (1, 1)), RECORD)
    assert found == ((0, 2), (1, 3))
    # A group may have its ranks in any order.
    found = slices.groups_of(payloads((3, 1), (1, 0), (1, 1), (3, 0)), RECORD)
    assert found == ((3, 0), (1, 2))


def test_groups_that_overlap_are_an_error() -> None:
    told = "groups that overlap.*all_reduce sum"
    with pytest.raises(ProcessGroupError, match=re.compile(told, re.DOTALL)):
        slices.groups_of(payloads((0, 0), (0, 1), (0, 1), (3, 0)), RECORD)


def test_programs_of_several_groups() -> None:
    p = ProgramWriter(2, [(0, 2), (1, 3)])
    x = p.parameter((4,), "f32")
    text = p.text([p.all_reduce(p.only_from(x, 1), "add")])
    assert "replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>" in text
    # Replicas 2 and 3 are the second of their groups.
    assert "dense<[0, 0, 1, 1]> : tensor<4xui32>" in text

"""Tiers for a test: CPU kernels alone, programs alone, or segments that go over at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lowering_type_checks
from tpu_core import _C, tiers
from tpu_core.config import config

lowering_type_checks.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what limits memory last: from then on a process checks it, and has programs alone."""
    items.sort(key=lambda item: item.path.name == "test_out_of_memory.py")


@pytest.fixture
def host() -> Iterator[None]:
    """CPU kernels wherever there is one."""
    yield from _in_force("host", config().tier_patience)


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tiers that a test is parametrized with (``indirect=True``)."""
    yield from _in_force(request.param, config().tier_patience)


@pytest.fixture(params=["compiled", "restless", "host"])
def every_tier(request: pytest.FixtureRequest) -> None:
    """Each test once with programs alone, with segments that go over to them, with CPU kernels."""
    if request.param != "compiled":
        request.getfixturevalue(request.param)


@pytest.fixture
def restless() -> Iterator[None]:
    """Segments go over to programs when they come for the third time."""
    yield from _in_force("auto", 0.0)


def _in_force(name: str, patience: float) -> Iterator[None]:
    torch.zeros(1, device="tpu")
    _C.flush()
    _C.set_tiers(tiers.NUMBERS[name])
    _C.set_patience(patience)
    yield
    _C.flush()
    _C.set_tiers(tiers.NUMBERS["compiled"])
    _C.set_patience(config().tier_patience)

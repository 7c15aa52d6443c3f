"""Implementations that other packages offer: when they are asked, and that programs know them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpu_core.lowering import implementations, load
from tpu_core.lowering.implementations import KernelSelection, Target, digest, implementation
from tpu_core.lowering.registry import REGISTRY

ADD = "aten.add.Tensor"


def minus(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - y


class Adding:
    """A kernel that shows by its result that it was taken."""

    name = "adding"

    def choose(
        self, overload: str, args: Any, kwargs: Any, target: Target, choice: str | None
    ) -> Callable[..., Any] | None:
        assert overload == ADD and len(args) == 2
        return None if choice == "plain" or target.devices > 1 else minus


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    implementations.sources()  # of the packages that are there, once for the process
    point = SimpleNamespace(load=Adding, module="nowhere.kernels")
    monkeypatch.setattr(implementations, "_offered", lambda: {ADD: point})


def taken(**chosen: str) -> Any:
    entry = REGISTRY.get(ADD)
    assert entry is not None
    with KernelSelection.using(chosen):
        found = implementation(entry, (1, 2), {})
    return "the lowering" if found is entry.fn else found


def test_a_kernel_is_asked_for_a_tpu_and_where_one_is_named() -> None:
    assert taken() == "the lowering"
    assert taken(adding="minus") is minus
    assert taken(another="minus") is minus
    assert taken(adding="plain") == "the lowering"
    with Target("tpu").applied():
        assert taken() is minus
        assert taken(adding="plain") == "the lowering"
    with Target("tpu", 4).applied():
        assert taken() == "the lowering"


def test_what_is_chosen_is_part_of_what_is_recorded() -> None:
    x, y = torch.ones(2, device="tpu"), torch.ones(2, device="tpu")
    assert (x + y).tolist() == [2, 2]
    with KernelSelection.using({"adding": "minus"}):
        assert (x + y).tolist() == [0, 0]
        with KernelSelection.using({"adding": "plain"}):
            assert (x + y).tolist() == [2, 2]
        late = x + y
        assert (x + y).tolist() == [0, 0]
    assert (x + y).tolist() == [2, 2]
    assert late.tolist() == [0, 0]


def test_a_digest_is_the_same_in_every_process() -> None:
    assert digest(()) == 0
    assert digest((("adding", "minus"),)) == 5690341899447501580

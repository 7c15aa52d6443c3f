"""Values that another thread will make, as the results of collectives are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import tpu_core
from tpu_core import _C, modes


@pytest.fixture(autouse=True)
def recorded() -> Iterator[None]:
    """Strict waits for what an op reads as soon as it is recorded."""
    with modes.using(modes.Mode("whole", max_ops=0)):
        yield


def promised(x: torch.Tensor) -> _C.Promise:
    promise = _C.promise(x)
    assert promise is not None
    return promise


def test_ops_are_recorded_on_a_promised_value() -> None:
    x = torch.zeros(3, device="tpu")
    view = x.view(3, 1)
    made = tpu_core.to_jax(torch.arange(3.0, device="tpu"))
    promise = promised(x)
    y = view * 2 + 1
    assert _C.state(y) == "pending"
    x.add_(10)  # of the promised value, too
    late = threading.Timer(0.05, promise.keep, [made])
    late.start()
    assert y.tolist() == [[1.0], [3.0], [5.0]]
    assert x.tolist() == [10.0, 11.0, 12.0]
    late.join()


def test_an_operand_keeps_the_value_that_it_was_made_of() -> None:
    x = torch.ones(3, device="tpu")
    operand = _C.Operand(x + 1)
    of_view = _C.Operand(torch.arange(4.0, device="tpu").view(2, 2).t())
    before = _C.Operand(x)
    x += 5
    assert not operand.array().is_deleted()
    assert operand.array().tolist() == [2.0] * 3
    assert of_view.array().tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert before.array().tolist() == [1.0] * 3
    for held in (operand, of_view, before):
        held.release()
    assert x.tolist() == [6.0] * 3


def test_the_last_use_of_a_value() -> None:
    x, y, z = (torch.arange(4.0, device="tpu") + i for i in range(3))
    operands = [_C.Operand(t) for t in (x, y, z)]
    assert not any(operand.is_last_use() for operand in operands)
    alias, array = y.clone(), tpu_core.to_jax(z)  # storages share a value until one is written
    promises = [promised(t) for t in (x, y, z)]
    assert [operand.is_last_use() for operand in operands] == [True, False, False]
    assert operands[0].array() is not None
    for promise in promises:
        promise.keep(array)
    for operand in operands:
        operand.release()
    assert alias.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert x.tolist() == y.tolist() == z.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_cut_waits_for_who_holds_its_inputs() -> None:
    x = torch.ones(70_000, device="tpu") * 2
    operand = _C.Operand(x)
    x += 1  # may take the memory, once it is not held
    late = threading.Timer(0.05, operand.release)
    late.start()
    assert x.sum().item() == 210_000.0
    late.join()


def test_a_promise_that_fails() -> None:
    x = torch.ones(3, device="tpu")
    promise = promised(x)
    y = x + 1
    promise.fail(ValueError("no rank came"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no rank came"):
            y.tolist()
    with pytest.raises(ValueError, match="no rank came"):
        x * 2
    promise.end(True)
    assert (x * 2).tolist() == [2.0] * 3


def test_what_was_written_after_a_promise_is_kept() -> None:
    x = torch.ones(3, device="tpu")
    promise = promised(x)
    x.zero_()
    promise.fail(ValueError("no rank came"))
    promise.end(True)
    assert x.tolist() == [0.0] * 3


def test_a_promise_is_for_a_whole_storage() -> None:
    x = torch.ones(4, 2, device="tpu")
    for part in (x[1:], x.t(), x.view(-1)[::2]):
        assert _C.promise(part) is None
    promised(x.view(-1)).end(True)
    assert x.tolist() == [[1.0, 1.0]] * 4


def test_ops_that_do_not_follow_from_a_failed_promise_are_kept() -> None:
    x, w = torch.ones(3, device="tpu"), torch.ones(2, device="tpu") * 4
    promise = promised(x)
    other = w * 2
    y = x + 1
    promise.fail(ValueError("no rank came"))
    with pytest.raises(ValueError, match="no rank came"):
        y.tolist()
    assert other.tolist() == [8.0, 8.0]
    promise.end(True)
    assert x.tolist() == [1.0] * 3

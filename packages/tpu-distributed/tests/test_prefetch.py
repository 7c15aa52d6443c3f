"""Batches are on the device ahead of their use, in order, and as the loader made them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from tpu_core import _C
from tpu_distributed import prefetch


class Source:
    """Counts the batches that were taken from it."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.count, self.fails, self.taken = count, fails, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.taken = 0
        for i in range(self.count):
            self.taken += 1
            yield torch.full((2, 3), float(i))
        if self.fails:
            raise KeyError("no more")


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_order_and_how_far_ahead(depth: int) -> None:
    source = Source(5)
    for _ in range(2):  # two epochs
        seen = []
        for number, batch in enumerate(prefetch(source, "tpu", depth), 1):
            assert source.taken == min(number + depth, 5)
            assert batch.device.type == "tpu"
            seen.append(batch)
        assert [b[0, 0].item() for b in seen] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_values_are_on_the_device_before_they_are_read() -> None:
    batches = iter(prefetch(Source(2), "tpu"))
    batch = next(batches)
    assert _C.state(batch) == "ready"
    assert _C.state(torch.ones(2, 3).to("tpu")) == "host"
    assert torch.equal((batch + 1).cpu(), torch.ones(2, 3))


def test_training_is_as_without() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
    loader = DataLoader(data, batch_size=4, pin_memory=True)
    results = []
    for batches in (prefetch(loader, "tpu"), loader):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1).to("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(batches) == 3
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x.to("tpu")), y.to("tpu")).backward()
            optimizer.step()
        results.append(model.weight.detach().cpu())
    assert torch.equal(*results)


def test_a_batch_may_be_changed_in_place() -> None:
    source = [torch.zeros(3) for _ in range(4)]
    for batch in prefetch(source, "tpu"):
        batch += 1
        assert batch.tolist() == [1.0] * 3
    assert all(b.tolist() == [0.0] * 3 for b in source)


class Encoding(UserDict[str, torch.Tensor]):
    """As of a tokenizer."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Encoding:
        return Encoding({k: v.to(device, non_blocking=non_blocking) for k, v in self.items()})


def test_structures() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    made = {
        "x": [torch.ones(2), (torch.ones(1, dtype=torch.int64), "name", 3, None)],
        "packed": packed,
        "tokens": Encoding(ids=torch.ones(2)),
    }
    (batch,) = prefetch([made], "tpu")
    x, (y, *others) = batch["x"]
    assert (x.device.type, y.device.type, y.dtype) == ("tpu", "tpu", torch.int64)
    assert others == ["name", 3, None]
    assert isinstance(batch["packed"], PackedSequence)
    assert batch["packed"].data.device.type == "tpu"
    assert batch["packed"].batch_sizes.device.type == "cpu"
    assert isinstance(batch["tokens"], Encoding)
    assert _C.state(batch["tokens"]["ids"]) == "ready"


def test_an_error_comes_in_its_turn() -> None:
    batches = iter(prefetch(Source(2, fails=True), "tpu", depth=5))
    assert [next(batches)[0, 0].item() for _ in range(2)] == [0.0, 1.0]
    with pytest.raises(KeyError, match="no more"):
        next(batches)


def test_other_devices_and_arguments() -> None:
    assert [b.device.type for b in prefetch(Source(3), "cpu")] == ["cpu"] * 3
    assert list(prefetch([], "tpu")) == []
    with pytest.raises(ValueError, match="at least 1, not 0"):
        prefetch([], "tpu", depth=0)
    with pytest.raises(TypeError):
        len(prefetch(iter([1]), "tpu"))

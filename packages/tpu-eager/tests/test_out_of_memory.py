"""A segment that finds too little memory leaves everything as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn

from tpu_core import modes
from tpu_core.config import override
from tpu_core.errors import OutOfMemoryError
from tpu_eager.background import scheduler
from tpu_eager.background.pool import Workers
from tpu_eager.fused import background

WHOLE = modes.Mode("whole", max_ops=0)
PIECES = modes.Mode("pieces", max_ops=0, providers=(background,))
MIB = 1 << 20


@contextmanager
def mode_of(mode: modes.Mode) -> Iterator[None]:
    with override(compile="background"), modes.using(mode):
        yield


@pytest.fixture(autouse=True)
def no_programs_of_several_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where segments may run in pieces they do, and no program takes over."""
    monkeypatch.setattr(scheduler, "_SHARE", 1e9)
    monkeypatch.setattr(Workers, "submit", lambda *_: None)


@contextmanager
def room_for(nbytes: int) -> Iterator[int]:
    """A limit of ``nbytes`` more than what is allocated now."""
    torch.tpu.synchronize()
    limit = torch.tpu.memory_allocated() + nbytes
    with override(memory_limit=limit):
        yield limit


def too_much(x: torch.Tensor) -> torch.Tensor:
    """More than 32 MiB of temporaries that cannot be fused away."""
    large = torch.arange(float(4 * MIB), device=x.device).view(2048, 2048) + x.sum()
    return (large @ large).sum()


def test_storages_keep_what_they_held_before_the_segment() -> None:
    with mode_of(WHOLE):
        weight, buffer = torch.arange(6.0, device="tpu"), torch.ones(5, device="tpu")
        shared, overwritten = torch.zeros(6, device="tpu"), torch.full((7,), 3.0, device="tpu")
        view = weight[2:4]
        with room_for(8 * MIB):
            weight.mul_(2).add_(1)
            view.zero_()
            buffer[1] = 7
            overwritten.fill_(4)
            shared.copy_(weight)
            made, copy = weight * 2, weight.clone()
            with pytest.raises(OutOfMemoryError) as caught:
                too_much(weight).item()
            assert isinstance(caught.value, torch.OutOfMemoryError)
            assert weight.tolist() == [0, 1, 2, 3, 4, 5] and view.tolist() == [2, 3]
            assert buffer.tolist() == [1] * 5 and overwritten.tolist() == [3] * 7
            assert shared.tolist() == [0] * 6
            for value in (made, copy):
                with pytest.raises(OutOfMemoryError):
                    value.cpu()
            # And all of it goes on from there.
            weight += 1
            overwritten += 1
            assert weight.tolist() == [1, 2, 3, 4, 5, 6] and overwritten.tolist() == [4] * 7


def test_what_is_written_from_the_host_in_between_stays() -> None:
    with mode_of(WHOLE):
        x, y = torch.zeros(3, device="tpu"), torch.zeros(3, device="tpu")
        with room_for(8 * MIB):
            x.add_(1)
            x.copy_(torch.tensor([5.0, 6.0, 7.0]))
            y.add_(1)
            y.copy_(torch.tensor([5.0, 6.0, 7.0]))
            y.mul_(2)
            with pytest.raises(OutOfMemoryError):
                too_much(y).item()
        assert x.tolist() == [5, 6, 7] and y.tolist() == [5, 6, 7]


def test_a_failed_segment_draws_no_random_numbers() -> None:
    with mode_of(WHOLE):
        torch.tpu.manual_seed(3)
        expected = torch.rand(9, device="tpu").cpu()
        torch.tpu.manual_seed(3)
        with room_for(8 * MIB):
            for _ in range(2):
                noise = torch.rand(9, device="tpu") + torch.randn(9, device="tpu")
                with pytest.raises(OutOfMemoryError):
                    too_much(noise).item()
        assert torch.equal(torch.rand(9, device="tpu").cpu(), expected)


def test_memory_of_the_freed_is_not_asked_for_again() -> None:
    """An optimizer's update takes the memory of what it updates."""
    with mode_of(WHOLE):
        weight = torch.ones(MIB, device="tpu")
        with room_for(MIB) as limit:
            torch.tpu.reset_peak_memory_stats()
            for _ in range(3):
                weight.mul_(2).add_(1)
                torch.tpu.synchronize()
            assert weight[:2].tolist() == [15, 15]
            assert torch.tpu.max_memory_allocated() <= limit


@pytest.mark.parametrize("mode", (WHOLE, PIECES), ids=lambda m: m.name)
def test_one_op_at_a_time_where_that_needs_less(mode: modes.Mode) -> None:
    """What a program keeps all at once is freed op by op, or the error names a true want."""
    with mode_of(mode):
        x = torch.ones(MIB // 4, device="tpu")
        with room_for(8 * MIB) as limit:
            torch.tpu.reset_peak_memory_stats()
            y = x
            for i in range(40):
                y = (y + i).flip(0)
            assert y[:2].tolist() == [781, 781]
            assert torch.tpu.max_memory_allocated() <= limit


def test_pieces_that_run_out_of_memory_give_back_what_the_first_wrote() -> None:
    with mode_of(PIECES):
        x = torch.zeros(3, device="tpu")
        for _ in range(2):
            with room_for(8 * MIB):
                x.add_(1)
                with pytest.raises(OutOfMemoryError):
                    too_much(x).item()
            assert x.tolist() == [0, 0, 0]


def test_an_allocation_over_the_limit_raises_at_its_line() -> None:
    with room_for(MIB):
        with pytest.raises(OutOfMemoryError):
            torch.empty(MIB, device="tpu")
        with pytest.raises(OutOfMemoryError):
            torch.zeros(MIB).to("tpu")
        assert torch.ones(4, device="tpu").sum().item() == 4


class Training:
    """A model with a buffer, dropout and an optimizer that counts its steps on the host."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        # A bias before the normalization has a gradient of rounding errors alone, which differ
        # between a program and its ops, and Adam scales them up to whole steps.
        self.model = nn.Sequential(
            nn.Linear(16, 64, bias=False),
            nn.BatchNorm1d(64),
            nn.Dropout(0.2),
            nn.ReLU(),
            nn.Linear(64, 16),
        ).to("tpu")
        self.optimizer = optimizer(self.model.parameters())
        torch.tpu.manual_seed(1)

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> list[torch.Tensor]:
        states = self.optimizer.state_dict()["state"].values()
        held = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        return [v.detach().cpu() for v in [*self.model.state_dict().values(), *held]]


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.of_cpu(reason="the limit is what programs need there")
@pytest.mark.parametrize("mode", (WHOLE, PIECES), ids=lambda m: m.name)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("first", (True, False), ids=("at first", "later"))
def test_halving_the_batch(
    mode: modes.Mode, optimizer: Callable[..., torch.optim.Optimizer], first: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(n, 16, generator=generator) for n in (8, 16384)]
    results = []
    with mode_of(mode):
        for limited in (True, False):
            training, sizes = Training(optimizer), []

            def halve(x: torch.Tensor, training: Training = training, sizes=sizes) -> None:
                try:
                    training.step(x.to("tpu"))
                except torch.OutOfMemoryError:
                    pass
                else:
                    sizes.append(len(x))
                    return
                training.optimizer.zero_grad()
                for half in x.chunk(2):
                    halve(half)

            if not first:
                training.step(batches[0].to("tpu"))
            if limited:
                with room_for(6 * MIB) as limit:
                    torch.tpu.reset_peak_memory_stats()
                    halve(batches[1])
                    assert torch.tpu.max_memory_allocated() <= limit
                assert len(sizes) > 1
                fitting = sizes
            else:
                for part in batches[1].split(fitting):
                    training.step(part.to("tpu"))
            results.append(training.state())
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


class CheckedTraining:
    """A training on either device, without random numbers.

    There is no bias before the batch norm: its gradient would be a rounding error, of which Adam
    makes a whole step.
    """

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(
            nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)
        ).to(device, torch.float64)
        self.optimizer = optimizer(self.model.parameters())

    def step(self, x: torch.Tensor) -> float:
        """The loss of one batch on the host."""
        self.optimizer.zero_grad()
        loss = (self.model(x.to(self.device)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and what the optimizer holds, on the CPU."""
        held = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for i, values in self.optimizer.state_dict()["state"].items():
            held |= {f"{i} {k}": v.cpu() for k, v in values.items() if torch.is_tensor(v)}
        return held


@pytest.mark.parametrize("mode", (WHOLE, PIECES), ids=lambda m: m.name)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_training_that_halves_its_batches_is_the_cpus_on_the_halves(
    mode: modes.Mode, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = (64, 16384, 64, 8192, 16384)
    batches = [torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in sizes]
    done, losses = [], []
    with mode_of(mode):
        training = CheckedTraining(optimizer, "tpu")
        with room_for(6 * MIB):
            for batch in batches:
                left = [batch]
                while left:
                    x = left.pop(0)
                    try:
                        losses.append(training.step(x))
                    except torch.OutOfMemoryError:
                        left[:0] = x.chunk(2)
                    else:
                        done.append(x)
        state = training.state()
    assert len(done) > len(batches) and torch.equal(torch.cat(done), torch.cat(batches))
    reference = CheckedTraining(optimizer, "cpu")
    torch.testing.assert_close(losses, [reference.step(x) for x in done])
    torch.testing.assert_close(state, reference.state())

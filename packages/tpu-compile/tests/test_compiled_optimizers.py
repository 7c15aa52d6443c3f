"""``torch.compile(optimizer.step)``: one graph, with the values of eager on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn as nn

from tpu_core.compiler import segment as segments
from tpu_core.compiler.aliases import aliases

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


class Training:
    """A small model, trained with a compiled or an ordinary optimizer."""

    def __init__(self, make: Make, device: str, width: int = 4) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, width).to(device)
        self.optimizer = make(self.model.parameters())
        self.device = device

    def step(self, update: Callable[[], object], i: int) -> None:
        self.optimizer.zero_grad()
        x = torch.full((2, 4), float(i + 1), device=self.device)
        self.model(x).square().sum().backward()
        update()

    def values(self) -> list[torch.Tensor]:
        """Parameters and what the optimizer keeps."""
        kept = [v for state in self.optimizer.state.values() for v in state.values()]
        return [t.detach().cpu() for t in [*self.model.parameters(), *kept]]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_as_on_the_cpu(make: Make) -> None:
    trained = []
    for device in ("cpu", "tpu"):
        training = Training(make, device)
        update = training.optimizer.step
        if device == "tpu":
            update = torch.compile(update)
        for i in range(3):
            training.step(update, i)
        trained.append(training.values())
    for want, got in zip(*trained, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_is_one_op(make: Make) -> None:
    """Also of optimizers that count their steps: the counts are on the device."""
    training = Training(make, "tpu")
    step = torch.compile(training.optimizer.step)
    for i in range(2):  # the first makes the optimizer's tensors
        training.step(step, i)
    counted = torch.tpu.metrics()["ops"]
    with torch.no_grad():
        step()
    assert torch.tpu.metrics()["ops"] - counted <= 1 + len(training.values())  # and the writes


def test_compiled_after_steps_in_eager() -> None:
    """Dynamo moves the counts of steps, as in the state of a checkpoint, to the device."""
    trained = []
    for device in ("cpu", "tpu"):
        training = Training(OPTIMIZERS["adam"], device)
        for i in range(2):
            training.step(training.optimizer.step, i)
        compiled = torch.compile(training.optimizer.step) if device == "tpu" else None
        for i in range(2):
            training.step(compiled or training.optimizer.step, i)
        trained.append(training.values())
    for want, got in zip(*trained, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_eager_steps_after_compiled_ones() -> None:
    trained = []
    for device in ("cpu", "tpu"):
        training = Training(OPTIMIZERS["adamw"], device)
        update = training.optimizer.step
        training.step(torch.compile(update) if device == "tpu" else update, 0)
        for i in range(2):
            training.step(training.optimizer.step, i)
        trained.append(training.values())
    for want, got in zip(*trained, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_what_is_updated_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """New values take the memory of the old ones: another's would cost copies of both."""
    lowered: list[segments.Segment] = []
    lower = segments.lower
    monkeypatch.setattr(segments, "lower", lambda s: lowered.append(s) or lower(s))
    training = Training(OPTIMIZERS["adam"], "tpu", width=5)  # of no other test, to be lowered here
    step = torch.compile(training.optimizer.step)
    with torch.tpu.set_eager_mode("fused"):
        for i in range(2):
            training.step(step, i)
    segment = lowered[-1]
    graph = next(n for n in segment.nodes if n.name == "tpu_compile.graph.default")
    # Bias and weight, and for each of them both moments and the count of steps.
    assert len(graph.outputs) == len(segment.donated) == 8
    paired = {segment.live[o]: segment.inputs()[i] for i, o in aliases(segment).items()}
    olds = [paired[slot] for slot in graph.outputs if slot is not None]
    assert sorted(olds) == sorted(segment.donated)
    assert olds == [slot for slot in graph.operands if slot in segment.donated]

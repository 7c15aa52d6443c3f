"""Loops with something in between settle on a few programs, with the values of the CPU."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from models.gpt import GPT
from tpu_core.config import override


class Training:
    """A small model with its optimizer, schedule and batches, on one device."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3))
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(8, 6, generator=generator) for _ in range(5)]
        self.steps = 0
        self.seen: list[float] = []

    def loss(self) -> torch.Tensor:
        x = self.batches[self.steps % len(self.batches)].to(self.device)
        self.steps += 1
        return self.model(x).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.update()
        return loss.detach()


def logging_every_10(t: Training) -> Iterator[None]:
    total = torch.zeros((), device=t.device)
    for i in range(45):
        total += t.step()
        if i % 10 == 9:
            t.seen.append(total.item() / 10)
            total.zero_()
        yield


def evaluation_in_between(t: Training) -> Iterator[None]:
    for i in range(24):
        t.step()
        if i % 6 == 5:
            t.model.eval()
            with torch.no_grad():
                right = torch.zeros((), dtype=torch.int64, device=t.device)
                for x in t.batches:
                    right += (t.model(x.to(t.device)).argmax(-1) == 0).sum()
            t.model.train()
            t.seen.append(right.item())
        yield


def accumulation_with_clipping_and_schedule(t: Training) -> Iterator[None]:
    for i in range(14):
        for _ in range(4):
            (t.loss() / 4).backward()
        norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.update()
        if i % 5 == 4:
            t.seen.append(norm.item())
        yield


def checkpoints(t: Training) -> Iterator[None]:
    for i in range(20):
        t.step()
        if i % 5 == 4:
            state = {k: v.cpu() for k, v in t.model.state_dict().items()}
            t.seen.append(state["0.bias"].sum().item())
            torch.save({"model": state, "optimizer": t.optimizer.state_dict()}, io.BytesIO())
        yield


def early_break(t: Training) -> Iterator[None]:
    for epoch in range(8):
        for i in range(6):
            loss = t.step()
            if i == (epoch * 5) % 6:
                break
        t.seen.append(loss.item())
        yield


def update_without_optimizer(t: Training) -> Iterator[None]:
    parameters = list(t.model.parameters())
    for _ in range(70):
        gradients = torch.autograd.grad(t.loss(), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients):
                p.sub_(0.05 * g)
        yield


def started_in_the_middle(t: Training) -> Iterator[None]:
    x = torch.ones(3, device=t.device)
    for _ in range(333):
        x = x * 0.99
    yield from update_without_optimizer(t)
    t.seen.append(x.sum().item())


# After which yield nothing is compiled any more.
LOOPS: dict[Callable[[Training], Iterator[None]], int] = {
    logging_every_10: 21,
    evaluation_in_between: 13,
    accumulation_with_clipping_and_schedule: 6,
    checkpoints: 11,
    early_break: 3,
    update_without_optimizer: 25,
    started_in_the_middle: 25,
}


def prepared() -> float:
    count = torch.tpu.metrics()
    return count["compiles"] + count["cache_hits_disk"]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_it_settles(loop: Callable[[Training], Iterator[None]]) -> None:
    # The loops that nothing cuts come to the bound sooner, and to their cut points.
    with override(segment_ops=400), torch.tpu.set_eager_mode("fused"):
        ours, made = Training("tpu"), [prepared()]
        for _ in loop(ours):
            made.append(prepared())
    new = [b - a for a, b in zip(made, made[1:])]
    assert not any(new[LOOPS[loop] :]), new
    theirs = Training("cpu")
    for _ in loop(theirs):
        pass
    assert ours.seen == pytest.approx(theirs.seen, rel=1e-4, abs=1e-5)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


def greedy(device: str, tokens: int) -> Iterator[torch.Tensor]:
    """Tokens of a GPT with fixed caches, none of them read by the host."""
    torch.manual_seed(0)
    model = GPT(dim=16, layers=1, length=96).to(device)
    ids = torch.randint(64, (2, 5)).to(device)
    caches, position = model.caches("slice", 2), 0
    with torch.no_grad():
        for _ in range(tokens):
            scores = model(ids, caches, position)[:, -1:]
            position += ids.shape[1]
            ids = F.softmax(scores, -1).argmax(-1)
            yield ids


def test_generation_without_reads_settles() -> None:
    made = []
    with override(segment_ops=400), torch.tpu.set_eager_mode("fused"):
        tokens = []
        for ids in greedy("tpu", 60):
            tokens.append(ids)
            made.append(prepared())
        assert made[-1] == made[-20]
        # Read together only now: what was written to the caches is still right.
        ours = torch.stack(tokens).cpu()
    torch.testing.assert_close(ours, torch.stack(list(greedy("cpu", 60))))

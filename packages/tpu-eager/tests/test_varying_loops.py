"""Loops whose number of rounds varies are cut once a round, so that the rounds share a program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tpu_core import modes
from tpu_core.metrics import METRICS

WIDTH = 16
LAYERS = torch.randn(4, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / 4


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with modes.using("fused"):
        yield


def answer(device: str, rounds: int, start: int = 3) -> torch.Tensor:
    """Rounds of attention over a cache that grows, behind a prompt."""
    layers = LAYERS.to(device)
    x = torch.linspace(0, 1, WIDTH, device=device)[None]
    cache = (torch.arange(start, device=device)[:, None] * 0.1 + x) @ layers[0]
    made = []
    for _ in range(rounds):
        for layer in layers[1:3]:
            x = F.layer_norm(x + F.silu(x @ layer) @ layers[3], (WIDTH,))
        weights = torch.softmax(x @ cache.T / 4, 1)
        x = torch.tanh(x + weights @ cache) + 0.1 * x.sigmoid() * x.cos()
        cache = torch.cat([cache, x])
        made.append(x[0, 0] + x.sum().sin())
    return torch.stack(made)


def compiled(work: Iterator[None]) -> list[int]:
    """Ops of each program that was compiled or loaded."""
    before = len(METRICS.compile_events())
    for _ in work:
        pass
    return [event.ops for event in METRICS.compile_events()[before:]]


def answers(*all_rounds: int, start: int = 3) -> Iterator[None]:
    for rounds in all_rounds:
        expected = answer("cpu", rounds, start)
        assert_close(answer("tpu", rounds, start).cpu(), expected, rtol=1e-4, atol=1e-5)
        yield


def test_rounds_share_a_program() -> None:
    assert max(compiled(answers(5, 9, 7))) > 200
    compiled(answers(12, 6))
    # What is left is the list of what the rounds made, another one for each number of them.
    assert all(ops <= 12 for ops in compiled(answers(15, 5, 20, 10, 18)))


def test_as_many_rounds_each_time_are_one_program() -> None:
    def steady(device: str) -> torch.Tensor:
        scale = torch.ones(3, device=device).cumsum(0).prod()  # another prefix
        return answer(device, 6) * scale

    for _ in range(3):
        steady("tpu").cpu()
    before = METRICS.snapshot()
    for _ in range(2):
        assert_close(steady("tpu").cpu(), steady("cpu"), rtol=1e-4, atol=1e-5)
    assert METRICS.delta(before)["executions"] == 2


def assert_later_steps_compile_nothing(
    train: Callable[..., Iterator[object]], first: Sequence[int], later: Sequence[int]
) -> None:
    """Compare steps of these numbers of rounds with the CPU; the later ones compile nothing."""
    on_cpu, on_device = train("cpu", *first, *later), train("tpu", *first, *later)

    def check(steps: int) -> Iterator[None]:
        for _ in range(steps):
            assert_close(next(on_device), next(on_cpu), rtol=1e-4, atol=1e-5)
            yield

    compiled(check(len(first)))
    assert not compiled(check(len(later)))


def test_micro_batches_share_a_program() -> None:
    """Another number of micro-batches each step, whose gradients add up."""

    def train(device: str, *steps: int) -> Iterator[torch.Tensor]:
        weight = LAYERS[0].clone().to(device).requires_grad_()
        optimizer = torch.optim.Adam([weight], 0.01)
        for batches in steps:
            for i in range(batches):
                x = torch.full((4, WIDTH), 0.1 * i, device=device)
                for _ in range(3):
                    x = F.layer_norm(torch.tanh(x @ weight), (WIDTH,))
                (x.square() * x[:, :1]).mean().div(batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield weight.detach().cpu()

    assert_later_steps_compile_nothing(train, (3, 5, 4, 6, 7), (2, 9, 12, 8, 15, 10, 3, 11))


def test_recurrences_of_any_length_share_programs_with_their_gradients() -> None:
    """A loop that is unrolled, its backward pass and the optimizer, of other sizes as well."""
    cell = torch.nn.GRUCell(WIDTH, WIDTH)

    def train(device: str, *steps: int) -> Iterator[list[torch.Tensor]]:
        model = copy.deepcopy(cell).to(device)
        # Beside a usual epsilon rounding decides where an element of small gradients goes.
        optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-4)
        for rounds in steps:
            x = torch.linspace(-1, 1, (2 + rounds % 3) * WIDTH).view(-1, WIDTH).to(device)
            state, loss = torch.zeros_like(x), torch.zeros((), device=device)
            for _ in range(rounds):
                state = model(F.layer_norm(x.tanh() + state.sin(), (WIDTH,)), state)
                gate = (state * state.sigmoid()).cos() + 0.5 * x.exp()
                loss = loss + (gate * torch.softmax(state, 1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield [loss.detach().cpu(), *(p.detach().cpu() for p in model.parameters())]

    first, later = (3, 7, 5, 4, 8, 6, 12, 11), (9, 14, 10, 16, 13, 20, 15, 17)
    assert_later_steps_compile_nothing(train, first, later)

"""Windows and shifts that differ in each step are inputs of one program."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from compile_counts import compiles
from tpu_core import modes
from tpu_core.metrics import METRICS


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


def test_writes_of_random_lengths():
    draw = random.Random(0)

    def step(_: int) -> None:
        x, y = torch.randn(3, 20, 24), torch.randn(3, 20, 24)
        (a, b), (c, d) = (sorted(draw.sample(range(n), 2)) for n in (21, 25))
        on_device, other = x.to("tpu"), y.to("tpu")
        x[:, a:b, c:d] = y[:, a:b, c:d]
        on_device[:, a:b, c:d] = other[:, a:b, c:d]
        torch.testing.assert_close(on_device.cpu(), x, rtol=0, atol=0)

    compiles(step, range(40))
    assert compiles(step, range(10)) <= 2


@pytest.mark.parametrize("width", [2, 6])
def test_padding_of_a_varying_length_in_front_that_may_be_negative(width):
    x = torch.arange(1.0, 2 * width + 1).view(2, width)
    for before in (1, 3, -1, 2, 0, -2, 5, 1 - width):
        for after in (2, 0):
            expected = F.pad(x, (before, after), value=7.0)
            padded = F.pad(x.to("tpu"), (before, after), value=7.0)
            torch.testing.assert_close(padded.cpu(), expected, rtol=0, atol=0)


def test_a_window_at_the_end_stays_there():
    for n in (5, 9, 6, 12, 11, 7):
        x, on_device = torch.zeros(13, 2), torch.zeros(13, 2, device="tpu")
        row = torch.randn(n, 2)
        x[13 - n :] = row
        on_device[13 - n :] = row.to("tpu")
        torch.testing.assert_close(on_device.cpu(), x, rtol=0, atol=0)


def test_shifts_are_inputs():
    x = torch.arange(35.0).view(5, 7)

    def step(i: int) -> None:
        shifts = (i - 9, 3 * i)
        rolled = torch.roll(x.to("tpu"), shifts, (0, 1))
        torch.testing.assert_close(rolled.cpu(), torch.roll(x, shifts, (0, 1)), rtol=0, atol=0)

    compiles(step, range(1))
    assert compiles(step, range(1, 20)) == 0


def test_gradient_of_a_roll():
    for shift in (2, -3, 1, 40):
        x = torch.randn(6, 5, requires_grad=True)
        y = x.detach().to("tpu").requires_grad_()
        for t in (x, y):
            (torch.roll(t, shift, 0) * torch.arange(5.0, device=t.device)).square().sum().backward()
        torch.testing.assert_close(y.grad.cpu(), x.grad)


def test_diagonals_are_inputs():
    def step(past: int) -> None:
        scores = torch.randn(2, 3, 3 + past)
        masked = [
            t.masked_fill(torch.ones(3, 3 + past, device=t.device).triu(1 + past) > 0, -9.0)
            .softmax(-1)
            .cpu()
            for t in (scores, scores.to("tpu"))
        ]
        torch.testing.assert_close(*masked)

    assert compiles(step, (5, 8, 6, 14, 9, 11, 7, 12)) <= 3


@pytest.mark.parametrize("name", ["tril", "triu", "tril_", "triu_"])
def test_diagonals_of_every_kind(name: str) -> None:
    for dtype in (torch.float32, torch.uint8, torch.bool):
        for diagonal in (0, 2, -1, 4, -7, 3, 300, -300, 2**40, -(2**62), 1):
            x = torch.arange(1, 13).reshape(3, 4).to(dtype)
            found = getattr(x.to("tpu"), name)(diagonal)
            torch.testing.assert_close(found.cpu(), getattr(x, name)(diagonal), rtol=0, atol=0)


def test_lines_with_the_same_ops_have_families_of_their_own():
    def in_front(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (64 - x.shape[1], 0)) * 3

    def behind(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 64 - x.shape[1])) * 3

    def step(n: int) -> None:
        for pad in (in_front, behind):
            x = torch.randn(2, n)
            torch.testing.assert_close(pad(x.to("tpu")).cpu(), pad(x))

    assert compiles(step, (33, 40, 50, 37, 45, 61, 42, 55)) <= 6


def test_the_reason_names_an_argument_that_is_no_size():
    def step(k: int) -> None:
        x = torch.randn(k, k + 1)
        torch.testing.assert_close(torch.rot90(x.to("tpu"), k).cpu(), torch.rot90(x, k))

    seen = len(METRICS.compile_events())
    compiles(step, (5, 7))
    event = METRICS.compile_events()[seen:][-1]
    assert event.reason.endswith(
        "not on padded arrays: aten.rot90.default has k = 7, earlier 5, which is no size"
    )


def test_chunks_of_a_prefill():
    projection, words = torch.randn(8, 8) * 0.3, torch.randn(20, 8)

    def last_scores(tokens: torch.Tensor) -> torch.Tensor:
        w, e = (t.to(tokens.device) for t in (projection, words))
        keys = torch.zeros(len(tokens), 0, 8, device=tokens.device)
        for i in range(0, tokens.shape[1], 6):
            chunk = F.embedding(tokens[:, i : i + 6], e) @ w
            keys = torch.cat([keys, chunk], 1)
            scores = (chunk @ keys.mT).softmax(-1) @ keys @ e.T
        return (scores[:, -1] - 0.5).softmax(-1)

    shapes = [(4, 12), (2, 11), (3, 10), (3, 9), (5, 8), (2, 11), (6, 10), (3, 12), (5, 11), (7, 8)]

    def step(i: int) -> None:
        tokens = torch.randint(20, shapes[i])
        torch.testing.assert_close(last_scores(tokens.to("tpu")).cpu(), last_scores(tokens))

    assert compiles(step, range(len(shapes))) <= 5


def _windows(x: torch.Tensor, kind: str, i: int) -> torch.Tensor:
    n, at = x.size(0), 3 * i % (x.size(0) - 4)
    return {
        "row": lambda: x[at],
        "row from the end": lambda: x[-1 - at],
        "last row": lambda: x[-1],
        "element": lambda: x[at, i % 3],
        "rows": lambda: x[at : at + 3],
        "columns": lambda: x[:, i % 2 : i % 2 + 2],
        "rows to the end": lambda: x[at + 1 :],
        "rows from the end": lambda: x[-2 - i % 3 :],
        "rows up to the end": lambda: x[: n - 1 - i % 2],
        "row of rows": lambda: x[at:][1],
    }[kind]()


@pytest.mark.parametrize("varies", [False, True], ids=["sizes constant", "sizes vary"])
@pytest.mark.parametrize(
    "kind, most",
    [
        ("row", 2),
        ("row from the end", 2),
        ("last row", 2),
        ("element", 2),
        ("rows", 2),
        ("columns", 2),
        ("rows to the end", 4),
        ("rows from the end", 4),
        ("rows up to the end", 4),
        ("row of rows", 4),
    ],
)
def test_gradients_of_windows(kind, most, varies):
    def step(i: int) -> None:
        x = torch.randn(9 + varies * (5 * i % 7), 4)
        gradients = []
        for device in ("cpu", "tpu"):
            w = x.to(device, copy=True).requires_grad_()
            (_windows(w, kind, i).square().sum() * 2 + w.sum()).backward()
            gradients.append(w.grad.cpu())
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)

    assert compiles(step, range(14)) <= most + 3 * varies
    assert compiles(step, range(14, 40)) <= 1 + varies


def test_flags_are_inputs():
    def step(i: int) -> None:
        flags, on_device = torch.ones(6), torch.ones(6, device="tpu")
        for x in (flags, on_device):
            x[i % 5 + 1] = i // 10 if i % 3 else i > 9
        torch.testing.assert_close(on_device.cpu(), flags, rtol=0, atol=0)

    compiles(step, range(10))
    assert compiles(step, range(10, 20)) == 0  # the first flags that are set

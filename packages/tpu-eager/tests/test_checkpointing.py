"""`torch.utils.checkpoint` in Fused: the CPU's results, less memory, all in one program."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tpu_core import _C
from tpu_core.pjrt import client as pjrt

Wrap = Callable[..., torch.Tensor]
REENTRANT = functools.partial(checkpoints.checkpoint, use_reentrant=True)
NON_REENTRANT = functools.partial(checkpoints.checkpoint, use_reentrant=False)


def plain(function: Wrap, *args: torch.Tensor) -> torch.Tensor:
    return function(*args)


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with torch.tpu.set_eager_mode("fused"):
        yield


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def step(device: str, wrap: Wrap, dropout: float = 0.0) -> list[torch.Tensor]:
    """Loss and gradients of a step of eight blocks, which updates the parameters too."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(32, dropout) for _ in range(8)).to(device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 256 * 32).view(256, 32).to(device).requires_grad_()
    hidden = x
    for block in blocks:
        hidden = wrap(block, hidden)
    loss = hidden.square().mean()
    loss.backward()
    optimizer.step()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in [x, *blocks.parameters()])]


def peak(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    """Temporary bytes of the largest program that something runs for the first time."""
    sizes: list[int] = []
    load = pjrt.load

    def measured(executable: object, *rest: object) -> object:
        sizes.append(executable.get_compiled_memory_stats().temp_size_in_bytes)  # type: ignore[attr-defined]
        return load(executable, *rest)  # type: ignore[arg-type]

    _C.clear_programs()
    with monkeypatch.context() as patched:
        patched.setattr(pjrt, "load", measured)
        work()
    return max(sizes)


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.of_cpu(reason="beside so little, other platforms need memory of their own")
@pytest.mark.parametrize(
    ("wrap", "dropout"),
    [(REENTRANT, 0.0), (NON_REENTRANT, 0.0), (NON_REENTRANT, 0.2)],
    ids=["reentrant", "non-reentrant", "dropout"],
)
def test_memory_is_saved(monkeypatch: pytest.MonkeyPatch, wrap: Wrap, dropout: float) -> None:
    results: list[list[torch.Tensor]] = []
    whole = peak(monkeypatch, lambda: results.append(step("tpu", plain, dropout)))
    saved = peak(monkeypatch, lambda: results.append(step("tpu", wrap, dropout)))
    assert saved < 0.6 * whole, (saved, whole)
    assert_close(results[1], results[0])
    if not dropout:  # random numbers are not those of the CPU
        for g, w in zip(results[1], step("cpu", plain), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=3e-5)


def body(x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return torch.tanh(x @ w) * scale + x.sin()


def several_inputs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = NON_REENTRANT(body, x, w)
    return REENTRANT(body, y, y[: w.size(0)].detach())


def keywords(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return NON_REENTRANT(body, w=w, x=x, scale=3.0)


def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return NON_REENTRANT(body, NON_REENTRANT(body, x, w), w).exp()

    return NON_REENTRANT(outer, NON_REENTRANT(outer, x))


def nested_reentrant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return REENTRANT(body, REENTRANT(body, x, w), w).exp()

    return REENTRANT(outer, REENTRANT(outer, x))


def gradient_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        y = NON_REENTRANT(body, x, w)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * g

    return NON_REENTRANT(inner, x, early_stop=False)


def without_early_stop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with checkpoints.set_checkpoint_early_stop(False):
        return NON_REENTRANT(body, NON_REENTRANT(body, x, w), w)


def selective(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        saved = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return NON_REENTRANT(body, NON_REENTRANT(body, x, w, context_fn=contexts), w)


def with_debug(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return NON_REENTRANT(body, x, w, debug=True)


def unchecked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return NON_REENTRANT(body, x, w, determinism_check="none")


def sequential(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    layers = [functools.partial(body, w=w)] * 4
    return checkpoints.checkpoint_sequential(layers, 2, x, use_reentrant=False)


def read_while_recomputing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def reading(x: torch.Tensor) -> torch.Tensor:
        y = body(x, w)
        return y * (2.0 if y.sum().item() > 0 else 3.0)

    return NON_REENTRANT(reading, REENTRANT(reading, x))


def counting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """How often it ran is in the state, and thereby in what comes after backward."""
    state = torch.zeros(4, device=x.device)

    def counted(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part.data.add_(1)
        return body(x, w)

    y = NON_REENTRANT(counted, x, state[1:3])
    (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y + g + state.sum()


PROGRAMS = [
    several_inputs,
    keywords,
    nested,
    nested_reentrant,
    gradient_inside,
    without_early_stop,
    selective,
    with_debug,
    unchecked,
    sequential,
    read_while_recomputing,
    counting,
]


def gradients(device: str, program: Wrap) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(5, 5, generator=generator).mul(0.3).to(device) for _ in range(2))
    x.requires_grad_()
    w.requires_grad_()
    y = program(x, w)
    y.sum().backward()
    return [t.detach().cpu() for t in (y, x.grad, w.grad)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_results_are_the_cpus(program: Wrap) -> None:
    assert_close(gradients("tpu", program), gradients("cpu", program))


def test_a_second_backward_recomputes_again() -> None:
    def twice(device: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 25).view(5, 5).to(device).requires_grad_()
        loss = NON_REENTRANT(body, x, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad.cpu()

    torch.testing.assert_close(twice("tpu"), twice("cpu"))


def test_a_gradient_that_comes_from_another_program() -> None:
    def cut(device: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 25).view(5, 5).to(device).requires_grad_()
        y = REENTRANT(body, NON_REENTRANT(body, x, x), x)
        if device == "tpu":
            torch.tpu.synchronize()
        y.backward(torch.ones_like(y))
        return x.grad.cpu()

    torch.testing.assert_close(cut("tpu"), cut("cpu"))


def test_several_threads_checkpoint_at_once() -> None:
    got: list[list[torch.Tensor]] = []

    def work() -> None:
        with torch.tpu.set_eager_mode("fused"):
            got.append(gradients("tpu", nested))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == len(threads)
    for results in got:
        assert_close(results, gradients("cpu", nested))


def test_sizes_that_vary() -> None:
    """Padded programs keep the barriers."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(8, 0.0) for _ in range(2))
    on_device = nn.ModuleList(Block(8, 0.0) for _ in range(2))
    on_device.load_state_dict(blocks.state_dict())
    on_device.to("tpu")
    before = torch.tpu.metrics()["padded_executions"]
    for length in (3, 5, 6, 7):
        x = torch.linspace(-1, 1, length * 8).view(length, 8)
        for model, value in ((blocks, x), (on_device, x.to("tpu"))):
            model.zero_grad()
            for block in model:
                value = NON_REENTRANT(block, value)
            value.square().sum().backward()
        assert_close(
            [p.grad.cpu() for p in on_device.parameters()], [p.grad for p in blocks.parameters()]
        )
    assert torch.tpu.metrics()["padded_executions"] > before


def test_other_devices_and_modes_record_nothing_more() -> None:
    def ops(work: Callable[[], object]) -> int:
        work()
        before = _C.counters()["ops"]
        work()
        return _C.counters()["ops"] - before

    assert ops(lambda: gradients("cpu", nested)) == 0
    fused = ops(lambda: gradients("tpu", keywords))
    with torch.tpu.set_eager_mode("strict"):
        strict = ops(lambda: gradients("tpu", keywords))
    assert fused == strict + 2  # a marker before the recomputation and one behind it

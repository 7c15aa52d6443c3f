"""`torch.utils.checkpoint` inside `torch.compile`: the same results, in less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tpu_compile.graph_op import GRAPHS
from tpu_core import _C
from tpu_core.pjrt import client as pjrt

Wrap = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.tpu.synchronize()  # what is recorded still needs its graphs
    GRAPHS.clear()
    with torch.tpu.set_eager_mode("fused"):
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def plain(function: Wrap, x: torch.Tensor) -> torch.Tensor:
    return function(x)


def whole(function: Wrap, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(function, x, use_reentrant=False)
    return result


def selective(function: Wrap, x: torch.Tensor) -> torch.Tensor:
    """Keeps the results of products alone."""
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        lambda _, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE
            if op is torch.ops.aten.addmm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    )
    result: torch.Tensor = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    return result


def step(device: str, wrap: Wrap, dropout: float = 0.0) -> list[torch.Tensor]:
    """Loss and gradients of a step of four blocks, which updates the parameters too."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(32, dropout) for _ in range(4)).to(device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 256 * 32).view(256, 32).to(device).requires_grad_()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = wrap(block, x)
        return x.square().mean()

    run = torch.compile(loss_of, fullgraph=True) if device == "tpu" else loss_of
    loss = run(x)
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

    torch._dynamo.reset()
    _C.clear_programs()
    with monkeypatch.context() as patched:
        patched.setattr(pjrt, "load", measured)
        work()
    return max(sizes)


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_memory_is_saved(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    found: list[list[torch.Tensor]] = []
    kept = peak(monkeypatch, lambda: found.append(step("tpu", plain, dropout)))
    state = torch.tpu.get_rng_state()
    recomputed = peak(monkeypatch, lambda: found.append(step("tpu", whole, dropout)))
    assert len(GRAPHS) == 2  # forward and backward, neither of them op by op
    assert recomputed < 0.6 * kept, (recomputed, kept)
    # The same is dropped again as was before, and as is without checkpoints.
    assert_close(found[1], found[0])
    assert torch.equal(torch.tpu.get_rng_state(), state)
    if not dropout:
        assert_close(found[1], step("cpu", plain))


def test_attention_that_drops_nothing() -> None:
    """A random op with a chance of 0 takes no words, and its state is kept all the same."""
    found = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        x = torch.randn(2, 2, 4, 8).to(device).requires_grad_()

        def attention(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, 2 * x, is_causal=True)

        loss_of = functools.partial(whole, attention)
        run = torch.compile(loss_of, fullgraph=True) if device == "tpu" else loss_of
        run(x).square().sum().backward()
        assert x.grad is not None
        found.append([x.grad.cpu()])
    assert_close(*found)


def test_selective_checkpoints() -> None:
    assert_close(step("tpu", selective), step("cpu", plain))
    assert len(GRAPHS) == 2

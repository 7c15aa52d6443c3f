"""What is compiled ahead of time computes what PyTorch does: traced programs run on XLA's CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tpu_compile.aot.annotations import scope
from tpu_compile.aot.capture import AotJob, Captured
from tpu_compile.aot.layers import capture_scanned
from tpu_compile.fx_utils import lowering_of
from tpu_core import lowering, runtime
from tpu_core.lowering.evaluate import to_jax
from tpu_core.recorder.compute import GraphEvaluator


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    runtime.runtime()
    lowering.load()


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 32), nn.Linear(32, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, shift: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.down(F.gelu(self.up(self.norm(x) + shift))))


class Stack(nn.Module):
    """Embedding, equal blocks, a tied head."""

    def __init__(self, layers: int = 4, dim: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, dim)
        self.shift = nn.Parameter(torch.randn(dim))
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(layers))
        self.head = nn.Linear(dim, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.shift, scale=0.5)
        return self.head(x)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def on_meta(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[nn.Module, Any]:
    """The model without values, so that none can have been read."""
    twin = copy.deepcopy(model)
    memo: dict[int, Any] = {}  # .to("meta") would untie weights
    for module in twin.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    new = tensor.detach().to("meta")
                    kept = memo.setdefault(
                        id(tensor), nn.Parameter(new) if tensor.requires_grad else new
                    )
                    table[name] = kept
    return twin, tuple(x.to("meta") for x in batch)


def run(captured: Captured, values: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Outputs by name; inputs that ``values`` lacks are zero."""
    arrays = [
        to_jax(
            values[leaf.name] if leaf.name in values else torch.zeros(leaf.shape, dtype=leaf.dtype)
        )
        for leaf in captured.inputs
    ]
    with jax.enable_x64(True):
        function = jax.jit(
            lambda *a: GraphEvaluator.run(
                captured.graph, a[:-1], a[-1], entry_of=lowering_of, scope=scope
            )
        )
        made = function(*arrays, jax.numpy.array([1, 2], jax.numpy.uint32))
    return {name: np.asarray(value) for name, value in zip(captured.outputs, made)}


def values_of(
    captured: Captured, model: nn.Module, batch: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {f"batch.{i}": x for i, x in enumerate(batch)}
    for leaf in captured.inputs:
        if leaf.kind in ("parameter", "buffer"):
            before, star, after = leaf.name.partition("*")
            members = [
                t for n, t in state.items() if star and n.startswith(before) and n.endswith(after)
            ]
            values[leaf.name] = torch.stack(members).detach() if star else state[leaf.name].detach()
    return values


def captured_step(
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    make: Callable[..., torch.optim.Optimizer] | None,
    scan: bool = False,
    remat: bool = False,
    **options: Any,
) -> tuple[Captured, dict[str, np.ndarray[Any, Any]]]:
    meta, inputs = on_meta(model, batch)
    job = AotJob(meta, inputs, {}, {}, optimizer=make, **options)
    captured, runs, notes = capture_scanned(job, scan, remat)
    assert bool(runs) is scan, notes
    return captured, run(captured, values_of(captured, model, batch))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, (3, 8), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def check_step(
    captured: Captured,
    made: dict[str, np.ndarray[Any, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
) -> None:
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(made["loss"], loss.item(), rtol=1e-5)
    after = values_of(captured, model, ())
    for leaf in captured.inputs:
        if leaf.kind == "parameter":
            expected = after[leaf.name].numpy()
            np.testing.assert_allclose(made[leaf.name], expected, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_updates_as_pytorch_does(name: str) -> None:
    torch.manual_seed(0)
    model = Stack(layers=2)
    captured, made = captured_step(model, batch(), OPTIMIZERS[name], loss="loss")
    optimizer = OPTIMIZERS[name](model.parameters())
    check_step(captured, made, model, optimizer, model.loss(*batch()))


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_update_as_pytorch_does(remat: bool) -> None:
    torch.manual_seed(0)
    model = Stack()
    make = OPTIMIZERS["adamw"]
    captured, made = captured_step(model, batch(), make, scan=True, remat=remat, loss="loss")
    assert "blocks.*.up.weight" in [leaf.name for leaf in captured.inputs]
    check_step(captured, made, model, make(model.parameters()), model.loss(*batch()))


def test_scanned_forward_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    model = Stack().eval()
    ids = batch()[:1]
    _, made = captured_step(model, ids, None, scan=True)
    np.testing.assert_allclose(made["output.0"], model(*ids).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_layers_of_a_scan_drop_different_elements_and_backward_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Dropout(0.5)) for _ in range(3)))

    def loss(model: nn.Module, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return model(x * w).sum()

    weights = nn.Module()
    weights.w, weights.layers = nn.Parameter(torch.ones(4000)), model
    meta, (x,) = on_meta(weights, (torch.ones(4000),))
    for remat in (False, True):
        job = AotJob(meta, (x,), {}, {}, loss=lambda m, x: m.layers(x * m.w).sum())
        captured, runs, notes = capture_scanned(job, True, remat)
        assert runs, notes
        made = run(captured, {"w": torch.ones(4000), "batch.0": torch.ones(4000)})
        grad = made["gradient of w"]
        assert abs((grad == 8).mean() - 1 / 8) < 0.03  # kept by all three, and scaled by each
        np.testing.assert_allclose(made["loss"], grad.sum(), rtol=1e-4)


def test_a_step_of_the_users_own_is_traced_whole() -> None:
    torch.manual_seed(0)
    model = Stack(layers=2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    make = OPTIMIZERS["adamw"]
    captured, made = captured_step(model, batch(), make, step=step)
    optimizer = make(model.parameters())
    loss = step(model, optimizer, *batch())
    np.testing.assert_allclose(made["output.0"], loss.item(), rtol=1e-5)
    after = values_of(captured, model, ())
    for name in ("blocks.0.up.weight", "tokens.weight"):
        np.testing.assert_allclose(made[name], after[name].numpy(), rtol=1e-4, atol=1e-5)


def test_buffers_are_written_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 4)
    _, made = captured_step(model, (x,), OPTIMIZERS["sgd"], loss=lambda m, x: m(x).square().mean())
    model(x)
    mean = model[1].running_mean
    assert mean is not None
    np.testing.assert_allclose(made["1.running_mean"], mean.numpy(), rtol=1e-5, atol=1e-6)
    assert made["1.num_batches_tracked"] == 1

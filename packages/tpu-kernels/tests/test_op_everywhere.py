"""One op in all the ways a program is run, and in loops, branches and stacks of layers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tpu_compile
from tpu_kernels import jax_op

Tensor = torch.Tensor


@jax_op("test_everywhere::softcap")
def softcap(x: jax.Array, cap: float = 30.0) -> jax.Array:
    return cap * jnp.tanh(x / cap)


@jax_op("test_everywhere::dense")
def dense(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    return {"y": jnp.tanh(x @ params["w"] + params["b"]), "size": jnp.sum(params["w"] ** 2)}


@jax_op("test_everywhere::append", mutates="cache")
def append(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(cache, new, (at,))


def reference(x: Tensor, cap: float = 30.0) -> Tensor:
    return cap * torch.tanh(x / cap)


class Layer(nn.Module):
    """A layer of JAX functions alone: one of tensors, one of a pytree."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        self.b = nn.Parameter(torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        out = dense({"w": self.w, "b": self.b}, softcap(x, 2.0))
        return out["y"] + 0.1 * out["size"]

    def reference(self, x: Tensor) -> Tensor:
        y = torch.tanh(reference(x, 2.0) @ self.w + self.b)
        return y + 0.1 * self.w.square().sum()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(f: Callable[..., Tensor], x: Tensor, *others: Tensor) -> list[Tensor]:
    """The result, and the gradients of its squares' sum by all arguments."""
    x = x.detach().requires_grad_()
    y = f(x)
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y.square().sum(), (x, *others)))]


def test_eager_compiled_and_exported_are_equal() -> None:
    layer, x = Layer(), torch.randn(3, 4)
    want = gradients(layer.reference, x, layer.w, layer.b)
    layer, x = layer.to("tpu"), x.to("tpu")
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    for f, weights in (
        (layer, layer),
        (torch.compile(layer, fullgraph=True), layer),
        (loaded, loaded),
    ):
        got = gradients(f, x, weights.w, weights.b)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    longer = torch.randn(5, 4, device="tpu")
    torch.testing.assert_close(loaded(longer).cpu(), layer(longer).cpu())


def test_a_training_step_compiles_ahead_of_time() -> None:
    layer = Layer().to("meta")
    plan = tpu_compile.aot(
        layer,
        (torch.empty(8, 4, device="meta"),),
        topology="v5e:1x1",
        loss=lambda model, x: model(x).square().mean(),
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
    )
    assert "tanh" in plan.hlo and plan.fits


def test_an_argument_that_is_written_in_an_exported_program() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, new: Tensor, at: Tensor) -> Tensor:
            append(self.cache, new, at)
            return self.cache * 2

    new, at = torch.ones(2, device="tpu"), torch.tensor(1, device="tpu")
    module = torch.export.export(Cache().to("tpu"), (new, at)).module()
    assert module(new, at).tolist() == [0, 2, 2, 0]
    assert module(new * 3, at + 1).tolist() == [0, 2, 6, 6]


def test_a_stack_of_layers() -> None:
    layers = nn.ModuleList(Layer() for _ in range(3))
    x = torch.randn(2, 4)

    def one_by_one(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer.reference(x)
        return x

    want = gradients(one_by_one, x, *layers.parameters())
    layers = layers.to("tpu")
    got = gradients(lambda x: tpu_compile.scan_layers(layers, x), x.to("tpu"), *layers.parameters())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


Op = Callable[..., Tensor]


def branches(op: Op, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: op(x, 2.0), lambda x: op(x, 1.0) * 2, (x,))


def rounds(op: Op, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, op(x, 2.0) * 1.5), (start, x))[1]


def running(op: Op, x: Tensor) -> Tensor:
    last, each = scan(
        lambda carry, row: (op(carry + row, 2.0), carry * row), torch.zeros_like(x[0]), x
    )
    return each + last


@pytest.mark.parametrize("f", [branches, rounds, running])
@pytest.mark.parametrize("compiled", [False, True])
def test_loops_and_branches(f: Callable[[Op, Tensor], Tensor], compiled: bool) -> None:
    x = torch.tensor([[1.0, -2.0, 4.0], [0.5, 0.25, -1.0]])
    want = gradients(lambda x: f(reference, x), x)
    torch._dynamo.reset()

    def run(x: Tensor) -> Tensor:
        return f(softcap, x)

    got = gradients(torch.compile(run, fullgraph=True) if compiled else run, x.to("tpu"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

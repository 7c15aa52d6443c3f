"""Derivatives in forward mode, and backward passes that compiled autograd compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.autograd.forward_ad as forward_ad

from tpu_kernels import jax_op

Tensor = torch.Tensor


@jax_op("test_derivatives::softcap")
def softcap(x: jax.Array, cap: float = 30.0) -> jax.Array:
    return cap * jnp.tanh(x / cap)


@jax_op("test_derivatives::ranked")
def ranked(p: dict[str, jax.Array], bias: jax.Array | None = None) -> dict[str, jax.Array]:
    y = p["x"] * p["y"]
    return {"order": jnp.argsort(p["x"]), "y": y if bias is None else y + bias}


@jax_op("test_derivatives::squares")
def squares(x: jax.Array) -> jax.Array:
    return x * jnp.conj(x[::-1]) + jnp.abs(x)


def reference(x: Tensor, cap: float = 30.0) -> Tensor:
    return cap * torch.tanh(x / cap)


def test_tangents() -> None:
    x, v = torch.randn(3), torch.randn(3)
    want = torch.func.jvp(lambda x: reference(x, 2.0), (x,), (v,))
    got = torch.func.jvp(lambda x: softcap(x, 2.0), (x.to("tpu"),), (v.to("tpu"),))
    torch.testing.assert_close([t.cpu() for t in got], list(want))
    with forward_ad.dual_level():
        y = softcap(forward_ad.make_dual(x.to("tpu"), v.to("tpu")), 2.0)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent.cpu(), want[1])


def test_tangents_of_a_pytree_where_some_are_missing() -> None:
    x = torch.tensor([3.0, 1.0], device="tpu")
    for bias in (None, None, x, x):  # a second call of the same arguments goes another way
        ranked({"x": x, "y": x}, bias)
        with forward_ad.dual_level():
            out = ranked({"x": forward_ad.make_dual(x, torch.ones_like(x)), "y": x}, bias)
            assert out["order"].tolist() == [1, 0]
            assert forward_ad.unpack_dual(out["order"]).tangent is None
            assert forward_ad.unpack_dual(out["y"]).tangent.tolist() == [3, 1]


def test_jacobians_and_hessians() -> None:
    x = torch.randn(3)
    for transform in (torch.func.jacfwd, torch.func.jacrev, torch.func.hessian):
        got = transform(lambda x: softcap(x, 2.0))(x.to("tpu"))
        torch.testing.assert_close(got.cpu(), transform(lambda x: reference(x, 2.0))(x))


def test_forward_mode_of_complex_values() -> None:
    x = torch.randn(3, dtype=torch.complex128).to("tpu").requires_grad_()
    assert torch.autograd.gradcheck(squares, (x,), check_forward_ad=True, fast_mode=True)


def test_gradients_of_tangents() -> None:
    def derivative(f: Callable[..., Any], x: Tensor) -> Tensor:
        x = x.requires_grad_()
        with forward_ad.dual_level():
            y = f(forward_ad.make_dual(x, torch.ones_like(x)), 2.0)
            tangent = forward_ad.unpack_dual(y).tangent
        return torch.autograd.grad(tangent.sum(), x)[0].cpu()

    x = torch.randn(3)
    torch.testing.assert_close(derivative(softcap, x.to("tpu")), derivative(reference, x))


def test_compiled_autograd() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["compiled_autograd"]
    before = counters["captures"]
    for n, cap in ((4, 2.0), (4, 2.0), (5, 2.0), (5, 3.0)):
        x = torch.randn(n)
        device_x = x.to("tpu").requires_grad_()
        x.requires_grad_()
        (reference(x, cap) * x).sum().backward()
        y = ranked({"x": softcap(device_x, cap), "y": device_x})["y"].sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True)):
            y.backward()
        torch.testing.assert_close(device_x.grad.cpu(), x.grad)
    # A graph for each cap; other sizes share it.
    assert counters["captures"] - before == 2
    torch._dynamo.reset()

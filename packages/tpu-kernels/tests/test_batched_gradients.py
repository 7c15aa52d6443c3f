"""Jacobians and batches of gradients of functions with a `jax_op` in them, as PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.extend.core import Primitive

from tpu_core.errors import JaxFunctionError
from tpu_kernels import jax_op

Tensor = torch.Tensor


@jax_op("test_batched_gradients::softcap")
def softcap(x: jax.Array, cap: float = 2.0) -> jax.Array:
    return cap * jnp.tanh(x / cap)


@jax_op("test_batched_gradients::cube", backward=lambda grad, x: grad * 3 * x * x)
def cube(x: jax.Array) -> jax.Array:
    return x**3


@jax_op("test_batched_gradients::product")
def product(p: dict[str, jax.Array], bias: jax.Array | None = None) -> dict[str, jax.Array]:
    y = p["x"] * p["y"][0]
    return {"order": jnp.argsort(p["x"]), "y": y if bias is None else y + bias}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ops of PyTorch": (torch.tanh, torch.tanh),
    "jax_op": (softcap, lambda x: 2 * torch.tanh(x / 2)),
    "with a backward": (cube, lambda x: x**3),
    "pytree": (lambda x: product({"x": x, "y": [x.sin()]}, x)["y"], lambda x: x * x.sin() + x),
}


def batched_gradients(f: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Of the first and of the second order."""
    x = x.requires_grad_()
    basis = torch.eye(3, device=x.device)
    (first,) = torch.autograd.grad(f(x), x, basis, is_grads_batched=True, create_graph=True)
    (one,) = torch.autograd.grad(f(x * 1).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(one, x, basis, is_grads_batched=True, retain_graph=True)
    return [first, second, torch.autograd.grad(first.square().sum(), x)[0]]


def vectorized(f: Callable[..., Any], x: Tensor) -> list[Tensor]:
    def total(x: Tensor) -> Tensor:
        return f(x).sum()

    functional = torch.autograd.functional
    return [
        functional.jacobian(f, x, vectorize=True),
        functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        functional.hessian(total, x, vectorize=True),
        # One vmap in another.
        functional.hessian(total, x, vectorize=True, outer_jacobian_strategy="forward-mode"),
    ]


def transformed(f: Callable[..., Any], x: Tensor) -> list[Tensor]:
    def total(x: Tensor) -> Tensor:
        return f(x).sum()

    func = torch.func
    return [
        func.jacrev(f, chunk_size=2)(x),
        func.jacfwd(f)(x),
        func.vmap(func.hessian(total))(torch.outer(x, x)),
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("derivatives", [batched_gradients, vectorized, transformed])
def test_as_on_the_cpu(derivatives: Callable[..., list[Tensor]], name: str) -> None:
    on_tpu, on_cpu = FUNCTIONS[name]
    x = torch.tensor([0.5, -1.5, 2.0])
    got = [g.detach().cpu() for g in derivatives(on_tpu, x.to("tpu"))]
    torch.testing.assert_close(got, [w.detach() for w in derivatives(on_cpu, x)])


def test_gradients_that_are_missing_for_some_results_and_arguments() -> None:
    x, y = (torch.tensor([v, 2.0], device="tpu", requires_grad=True) for v in (1.0, 3.0))
    fixed = torch.ones(2, device="tpu")
    out = product({"x": x, "y": [y]}, fixed)
    gradients = torch.autograd.grad(
        out["y"], (x, y), torch.eye(2, device="tpu")[:1], is_grads_batched=True
    )
    assert [g.tolist() for g in gradients] == [[[3, 0]], [[1, 0]]]


def test_complex_tangents_by_a_backward() -> None:
    square = jax_op(
        "test_batched_gradients::square",
        lambda x: x * x + jnp.conj(x),
        backward=lambda grad, x: grad * 2 * jnp.conj(x) + jnp.conj(grad),
    )
    x, v = torch.randn(2, 3, dtype=torch.complex64)
    _, tangent = torch.func.jvp(square, (x.to("tpu"),), (v.to("tpu"),))
    torch.testing.assert_close(tangent.cpu(), 2 * x * v + v.conj())


def test_a_function_that_jax_cannot_batch() -> None:
    primitive = Primitive("without_rules")
    primitive.def_abstract_eval(lambda x: x)
    op = jax_op("test_batched_gradients::odd", lambda x: x, backward=lambda g, x: primitive.bind(g))
    x = torch.ones(2, device="tpu", requires_grad=True)
    with pytest.raises(JaxFunctionError, match="Batching rule for 'without_rules'") as raised:
        torch.autograd.grad(op(x), x, torch.eye(2, device="tpu"), is_grads_batched=True)
    assert "without is_grads_batched=True" in str(raised.value)

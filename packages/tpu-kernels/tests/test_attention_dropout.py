"""Dropout and gradients of biases in attention's kernels, against the plain path."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_core.lowering import attention as plain
from tpu_core.lowering.implementations import Target
from tpu_kernels.ops.attention import dropout, flash

QUICKLY: Any = {"xla_backend_optimization_level": 0}
KEY = np.array([0xDEADBEEF, 7], np.uint32)


def test_random_bits_are_those_of_jax_beyond_32_bits_of_index() -> None:
    row = jnp.asarray([0, 1, 65_537, 2**31 + 3, 2**32 - 1], np.uint32)
    high, low = dropout._wide_product(row, 70_001)
    exact = [int(n) * 70_001 for n in np.asarray(row)]
    assert [int(h) << 32 | int(n) for h, n in zip(high, low)] == exact
    place = jnp.arange(1000, dtype=np.uint32)
    key = jnp.asarray(KEY)
    drawn = dropout._bits((key[0], key[1]), jnp.zeros_like(place), place)
    np.testing.assert_array_equal(drawn, jax.random.bits(key, (1000,), np.uint32))


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], float, bool, Any]] = {
    "causal, several blocks": ((1, 2, 300, 32), (1, 2, 300, 32), 0.2, True, None),
    "grouped queries": ((2, 4, 37, 16), (2, 2, 131, 16), 0.5, False, None),
    "a mask": ((2, 2, 20, 8), (2, 2, 140, 8), 0.1, False, lambda: torch.rand(2, 1, 20, 140) < 0.5),
    "all is dropped": ((1, 1, 5, 8), (1, 1, 7, 8), 1.0, False, None),
}


@pytest.mark.parametrize("name", CASES)
def test_both_paths_drop_the_same(name: str) -> None:
    q_shape, k_shape, rate, is_causal, mask = CASES[name]
    arrays = [jnp.asarray(torch.randn(s).numpy()) for s in (q_shape, k_shape, k_shape, q_shape)]
    bias = None if mask is None else jnp.asarray(mask().numpy())

    def run(forward: Any, backward: Any) -> Any:
        def both(q: Any, k: Any, v: Any, grad: Any, key: Any) -> Any:
            out = forward(q, k, v, bias, rate, is_causal, key=key)
            saved = (out[0], out[1], None, None, 0, 0, rate, is_causal, out[6], out[7])
            return out[0], *backward(grad, q, k, v, bias, [True, True, True, False], *saved)[:3]

        with Target("cpu").applied(), jax.enable_x64(True):
            compiled = jax.jit(both).lower(*arrays, KEY).compile(QUICKLY)
            return [np.asarray(x) for x in compiled(*arrays, KEY)]

    got = run(flash.forward, flash.backward)
    expected = run(plain.attention, plain.attention_backward)
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)
    assert rate < 1 or not got[0].any()


def test_a_seed_gives_the_same_by_either_implementation() -> None:
    leaves = [torch.randn(1, 2, 40, 16, device="tpu", requires_grad=True) for _ in range(3)]
    q, k, v = leaves

    def run(name: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        with tpu_kernels.using(attention=name):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            return [x.detach().cpu() for x in (out, *grads)]

    torch.testing.assert_close(run("pallas"), run("plain"), atol=2e-5, rtol=2e-5)


BIASES = {
    "for all batches, as in T5": (1, 4, 33, 140),
    "shared by heads": (2, 1, 33, 140),
    "of two dimensions": (33, 140),
}


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES.keys())
def test_the_gradient_of_a_bias(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 4, 33, 16), torch.randn(2, 2, 140, 16)
    bias, grad = torch.randn(shape), torch.randn(2, 4, 33, 16)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        q, k, b, g = tensors
        leaves = [x.detach().requires_grad_() for x in (q, k, b)]
        out = F.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[1], leaves[2], enable_gqa=True
        )
        grads = torch.autograd.grad(out, leaves, g)
        return [x.detach().cpu().double() for x in (out, *grads)]

    expected = run(*(x.double() for x in (query, key, bias, grad)))
    with tpu_kernels.using(attention="pallas"):
        got = run(*(x.to("tpu") for x in (query, key, bias, grad)))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_the_gradient_of_a_bias_of_a_single_query() -> None:
    q, bias = torch.randn(1, 1, 1, 8), torch.randn(1, 5, dtype=torch.bfloat16)
    keys = torch.randn(1, 1, 5, 8)
    leaf = bias.double().requires_grad_()
    out = F.scaled_dot_product_attention(q.double(), keys.double(), keys.double(), leaf)
    (expected,) = torch.autograd.grad(out.sum(), leaf)
    with tpu_kernels.using(attention="pallas"):
        moved = bias.to("tpu").requires_grad_()
        device_q, device_keys = q.to("tpu"), keys.to("tpu")
        out = F.scaled_dot_product_attention(device_q, device_keys, device_keys, moved.float())
        (got,) = torch.autograd.grad(out.sum(), moved)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().double(), expected, atol=2e-2, rtol=2e-2)

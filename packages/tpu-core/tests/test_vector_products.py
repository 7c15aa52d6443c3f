"""Products with a vector read a transposed matrix as it lies; results are those of the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tpu_core.pjrt import client as pjrt

# What is computed, and the shapes of its arguments.
PRODUCTS = {
    "one row by a weight": (F.linear, (1, 5), (7, 5)),
    "with a bias": (F.linear, (1, 1, 5), (7, 5), (7,)),
    "a transposed matrix by a vector": (lambda a, v: a.t() @ v, (5, 7), (5,)),
    "a transposed matrix by a column": (lambda a, v: a.t() @ v, (5, 7), (5, 1)),
    "a slice of a transposed matrix": (lambda v, a: v @ a.t()[:, 1:4], (1, 5), (7, 5)),
    "one query": (lambda q, k: q @ k.transpose(1, 2), (3, 1, 5), (3, 7, 5)),
    "one query, heads in the middle": (
        lambda q, k: q @ k.permute(1, 2, 0),
        (3, 1, 5),
        (7, 3, 5),
    ),
    "free dims in another order": (
        lambda v, a: torch.tensordot(v, a.permute(1, 0, 2), ([0], [2])),
        (5,),
        (2, 3, 5),
    ),
    "two vectors": (lambda u, v: u.t() @ v.t(), (5, 1), (1, 5)),
    "matrices": (lambda a, b: a @ b.t(), (2, 5), (7, 5)),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in PRODUCTS), ("with a bias", torch.bfloat16)],
)
def test_values_and_gradients(case, dtype):
    compute, *shapes = PRODUCTS[case]
    g = torch.Generator().manual_seed(0)
    here = [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]
    there = [t.detach().to("tpu").requires_grad_() for t in here]
    expected, result = compute(*here), compute(*there)
    torch.testing.assert_close(result.cpu(), expected)
    for y in (expected, result):
        y.float().square().sum().backward()
    for a, b in zip(here, there):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def _dots(function, *shapes):
    """Lines of the module's products, and whether it has any transpose."""
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    text = pjrt.module_text(pjrt.module_bytes(jax.jit(function).lower(*arguments)))
    transposed = {line.split()[0] for line in text.splitlines() if "stablehlo.transpose" in line}
    (dot,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
    return dot, any(f"{name}," in dot or f"{name} " in dot for name in transposed)


@pytest.mark.parametrize(
    ("function", "shapes", "dims"),
    [
        (lambda x, w: x @ w.T, ((1, 5), (7, 5)), "contracting_dims = [1] x [1]"),
        (lambda w, x: w.T @ x, ((5, 7), (5,)), "contracting_dims = [0] x [0]"),
        (
            lambda q, k: q @ k.transpose(1, 2, 0),
            ((3, 1, 5), (7, 3, 5)),
            "batching_dims = [0] x [1], contracting_dims = [2] x [2]",
        ),
    ],
    ids=["row", "vector", "batch"],
)
def test_transposes_are_folded(function, shapes, dims):
    dot, reads_transposed = _dots(function, *shapes)
    assert dims in dot and not reads_transposed


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w.T, ((2, 5), (7, 5))),
        (
            lambda x, w: jnp.tensordot(x, w.transpose(1, 0, 2), ((0,), (2,))),
            ((5,), (2, 3, 5)),
        ),
    ],
    ids=["matrices", "free dims in another order"],
)
def test_other_transposes_are_left_alone(function, shapes):
    assert _dots(function, *shapes)[1]

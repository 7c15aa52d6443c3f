"""Products with weights of 4 bits: values of every implementation, and when it is chosen."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from tpu_core.lowering.implementations import Target
from tpu_kernels import KernelRuleError, int4_mm, int4_pack, int4_repack, using
from tpu_kernels.ops.int4_mm.api import KERNEL
from tpu_kernels.ops.int4_mm.arguments import Int4Arguments
from tpu_kernels.ops.int4_mm.pallas import int4_mm as kernel

HALF = torch.bfloat16


def weight(rows: int, columns: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers a byte, scales and zeros, and what they stand for in float64."""
    numbers = torch.randint(0, 16, (rows, columns))
    given = torch.stack(
        [torch.rand(columns // group, rows) / 8, torch.randn(columns // group, rows)], -1
    ).to(HALF)
    scales, zeros = (given[..., i].T.double().repeat_interleave(group, 1) for i in range(2))
    return (
        (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8),
        given,
        (numbers - 8) * scales + zeros,
    )


def product(x: torch.Tensor, given: tuple[torch.Tensor, ...], group: int) -> torch.Tensor:
    halves, scales_and_zeros, _ = given
    packed = int4_pack(halves.to("tpu"))
    return int4_mm(x.to("tpu"), packed, group, scales_and_zeros.to("tpu")).cpu()


# Of weights made of integers in bfloat16 a number has eight bits, and so has a result.
def check(got: torch.Tensor, x: torch.Tensor, given: tuple[torch.Tensor, ...]) -> None:
    want, size = x.double() @ given[2].T, x.double().abs() @ given[2].abs().T
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 2**-9 * size).all()


CASES = [
    # tokens, rows, columns, group
    (1, 24, 128, 32),  # fewer columns than a step, and rows than lanes
    (7, 640, 1152, 128),  # the last step and the last block are not whole
    (64, 128, 256, 64),
    (131, 136, 256, 32),  # many rows
    (521, 1032, 1280, 256),
    (129, 128, 512, 512),
]


@pytest.mark.parametrize(("tokens", "rows", "columns", "group"), CASES)
@pytest.mark.parametrize("implementation", ["pallas", "plain"])
def test_values(implementation: str, tokens: int, rows: int, columns: int, group: int) -> None:
    given, x = weight(rows, columns, group), torch.randn(tokens, columns).to(HALF)
    with using(int4_mm=implementation):
        check(product(x, given, group), x, given)


def test_scaled_products_are_as_exact_as_float32() -> None:
    """Numbers are biased in the kernel; what that adds is taken away again."""
    given, x = weight(128, 256, 128), 1000 + torch.randn(4, 256).to(HALF)
    with using(int4_mm="pallas"):
        got = product(x, given, 128).double()
    want, size = x.double() @ given[2].T, x.double().abs().sum(1)[:, None]
    assert ((got - want).abs() <= 2**-8 * want.abs() + 2**-18 * size).all()


def test_weights_packed_for_cuda() -> None:
    given, x = weight(136, 256, 64), torch.randn(5, 256).to(HALF)
    of_cuda = torch._convert_weight_to_int4pack(given[0].to("tpu"), 8)
    assert torch.equal(int4_repack(of_cuda).cpu(), int4_pack(given[0].to("tpu")).cpu())
    for implementation in ("pallas", "plain"):
        with using(int4_mm=implementation):
            got = torch._weight_int4pack_mm(x.to("tpu"), of_cuda, 64, given[1].to("tpu"))
        check(got.cpu(), x, given)


def test_gradients_of_rows() -> None:
    """By the plain path, of rows with leading dimensions."""
    given, x = weight(24, 256, 128), torch.randn(2, 3, 256, dtype=torch.float32)
    moved = x.to("tpu").requires_grad_()
    packed, scales = int4_pack(given[0].to("tpu")), given[1].float().to("tpu")
    out = int4_mm(moved, packed, 128, scales)
    out.square().sum().backward()
    torch.testing.assert_close(
        out.detach().cpu().double(), x.double() @ given[2].T, rtol=1e-5, atol=1e-4
    )
    wanted = 2 * (x.double() @ given[2].T) @ given[2]
    assert moved.grad is not None
    torch.testing.assert_close(moved.grad.cpu().double(), wanted, rtol=1e-4, atol=1e-2)


def test_compiled() -> None:
    given, x = weight(128, 256, 128), torch.randn(3, 256).to(HALF)
    compiled = torch.compile(lambda x, w, s: int4_mm(x, w, 128, s).relu(), fullgraph=True)
    got = compiled(x.to("tpu"), int4_pack(given[0].to("tpu")), given[1].to("tpu"))
    torch.testing.assert_close(got.cpu(), product(x, given, 128).relu())


def test_when_the_kernel_is_chosen() -> None:
    given = Int4Arguments((4, 4096), (512, 14336), 128, "bfloat16")
    tpu = Target("tpu", kind="TPU v5e")
    assert KERNEL.select(given, tpu, None).name == "pallas"
    assert KERNEL.select(given, Target("cpu"), None).name == "plain"
    for other, target, rule in (
        (replace(given, dtype="float32"), tpu, "dtype"),
        (replace(given, group=16), tpu, "32 or 64"),
        (replace(given, rows=(0, 4096)), tpu, "0"),
        (replace(given, packed=(1792, 64, 32, 2)), tpu, "inner tiles"),
        (given, replace(tpu, devices=4), "one device"),
        (given, replace(tpu, kind="TPU v3"), "v3"),
    ):
        assert KERNEL.select(other, target, None).name == "plain"
        with pytest.raises(KernelRuleError, match=rule):
            KERNEL.select(other, target, "pallas")


@pytest.mark.parametrize("tokens", [1, 256])
def test_a_program_for_a_tpu_has_the_kernel(tokens: int) -> None:
    avals = (
        jax.ShapeDtypeStruct((tokens, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((128, 512), jnp.int32),
        jax.ShapeDtypeStruct((8, 512, 2), jnp.bfloat16),
    )
    with Target("tpu", kind="TPU v5e").applied():
        traced = jax.jit(lambda x, w, s: kernel(x, w, 128, s)).trace(*avals)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


X, W, S = torch.zeros(2, 256), torch.zeros(32, 8, dtype=torch.int32), torch.zeros(2, 8, 2)
MISTAKES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "bytes": (int4_pack, (torch.zeros(8, 128),), "uint8[rows, columns / 2]"),
    "a part of a chunk": (int4_pack, (torch.zeros(8, 96, dtype=torch.uint8),), "multiple of 128"),
    "inner tiles": (int4_repack, (torch.zeros(1, 4, 32, 2, dtype=torch.int32),), "8 inner tiles"),
    "a weight of CUDA's layout": (int4_mm, (X, W.view(1, 2, 32, 4), 128, S), "of int4_pack"),
    "columns": (int4_mm, (X[:, :128], W, 128, S), "meet a weight of 256 columns"),
    "scales": (int4_mm, (X, W, 64, S), "in groups of 64 scales and zeros are (columns / group, 8"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    function, args, message = MISTAKES[name]
    moved = [a.to("tpu") if isinstance(a, torch.Tensor) else a for a in args]
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*moved)

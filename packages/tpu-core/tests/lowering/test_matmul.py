"""Matrix products against the CPU, and the precision they are computed in."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import lax

from lowering.harness import CompareLowerings, check_opinfo
from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import matmul
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.precision import matmul_precision, precision, precision_name
from tpu_core.lowering.registry import REGISTRY

F32, BF16, I64, C64 = torch.float32, torch.bfloat16, torch.int64, torch.complex64
TOLERANCE = {
    # A cancelling complex sum in another order than BLAS's.
    C64: (1e-5, 1e-4),
}
OPINFO = {
    "mm": {"aten.mm.default"},
    "bmm": {"aten.bmm.default"},
    "addmm": {"aten.addmm.default", "aten.mm.default"},
    "baddbmm": {"aten.baddbmm.default", "aten.bmm.default"},
    "addmv": {"aten.addmv.default", "aten.mv.default"},
    "mv": {"aten.mv.default"},
    "dot": {"aten.dot.default"},
    "vdot": {"aten.vdot.default"},
    "nn.functional.linear": {"aten.addmm.default"},
    "nn.functional.bilinear": {"aten._trilinear.default"},
}


@pytest.mark.parametrize("name", OPINFO)
def test_opinfo(name: str) -> None:
    torch.manual_seed(0)
    mode = check_opinfo(
        name, (F32, BF16, I64, C64), samples=2, tolerance=TOLERANCE, check_width=True
    )
    assert not mode.failures, mode.failures
    assert OPINFO[name] <= mode.seen


@pytest.mark.parametrize("name", ["addbmm", "addr"])
def test_opinfo_of_ops_that_the_cpu_rounds_between_steps(name: str) -> None:
    """bfloat16 is left to the test below: the CPU rounds every partial sum to it."""
    torch.manual_seed(0)
    # 25 products of up to 81 that cancel, in another order than BLAS's.
    tolerance = {F32: (1e-5, 1e-4)}
    mode = check_opinfo(name, (F32, I64, torch.bool, torch.float64), samples=3, tolerance=tolerance)
    assert not mode.failures, mode.failures
    assert f"aten.{name}.default" in mode.seen


@pytest.mark.parametrize(
    ("m", "n", "k"), [(768, 64, 400), (64, 768, 400), (1024, 1024, 16)], ids=str
)
def test_large_product_of_a_transposed_operand(m: int, n: int, k: int) -> None:
    """A weight's gradient, which a CPU computes from moved operands, whichever is smaller."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(k, m, generator=g), torch.randn(k, n, generator=g)
    with CompareLowerings(tolerance={F32: (1e-5, 1e-4)}) as mode:
        a.t() @ b
    assert mode.seen == {"aten.mm.default"} and not mode.failures, mode.failures


@pytest.mark.parametrize(("m", "n"), [(768, 64), (64, 768)], ids=str)
def test_xla_does_not_undo_the_moves(m: int, n: int) -> None:
    """It would fold a transpose into the product, which then contracts the slow way again."""
    a, b = (jax.ShapeDtypeStruct((400, size), np.float32) for size in (m, n))
    product = jax.jit(lambda a, b: matmul.mm(a.T, b, contiguous=(False, True)))
    # As programs are compiled: without the pass that strips barriers (tpu_core.pjrt).
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    text = product.lower(a, b).compile(compiler_options=options).as_text()
    assert "lhs_contracting_dims={1}" in text and "lhs_contracting_dims={0}" not in text


@pytest.mark.parametrize(("platform", "moves"), [("cpu", True), ("tpu", False)])
def test_only_a_cpu_moves_operands(platform: str, moves: bool) -> None:
    product = jax.jit(lambda a, b: matmul.mm(a.T, b, contiguous=(False, True)))
    a = jax.ShapeDtypeStruct((256, 512), np.float32)
    text = product.trace(a, a).lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in text) == moves
    assert text.count("dot_general") == 1


def _call(op: str, args: Any, shape: tuple[int, ...], dtype: torch.dtype, **kwargs: Any) -> Any:
    out = (jax.ShapeDtypeStruct(shape, to_numpy_dtype(dtype)),)
    with jax.enable_x64(True):
        args = tuple(to_jax(a) if isinstance(a, torch.Tensor) else a for a in args)
        return to_torch(call_lowering(REGISTRY.get(op), args, kwargs, out)[0])


def test_bfloat16_rounds_once() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 5, 7, dtype=BF16), torch.randn(6, 7, 4, dtype=BF16)
    x = torch.randn(5, 4, dtype=BF16)
    expected = torch.addbmm(x.double(), a.double(), b.double(), beta=0.5, alpha=2)
    actual = _call("aten.addbmm.default", (x, a, b), (5, 4), BF16, beta=0.5, alpha=2)
    torch.testing.assert_close(actual, expected.to(BF16), rtol=2**-8, atol=0)


@pytest.mark.parametrize("op", ["addmm", "addmv", "addr", "baddbmm"])
def test_zero_beta_ignores_nan(op: str) -> None:
    nan = torch.full((3,) * {"baddbmm": 3, "addmv": 1}.get(op, 2), torch.nan)
    a, b = torch.ones(3, 3), torch.ones(3, 3)
    operands = {
        "addmm": (a, b), "addmv": (a, a[0]), "addr": (a[0], b[0]),
        "baddbmm": (a.expand(3, 3, 3), b.expand(3, 3, 3)),
    }[op]  # fmt: skip
    mode = CompareLowerings()
    with mode:
        assert not getattr(torch, op)(nan, *operands, beta=0).isnan().any()
    assert not mode.failures, mode.failures


def test_empty_operands() -> None:
    mode = CompareLowerings()
    with mode:
        torch.mm(torch.ones(2, 0), torch.ones(0, 3))
        torch.addmm(torch.ones(3), torch.ones(2, 0), torch.ones(0, 3), beta=2.0)
        torch.bmm(torch.ones(0, 2, 3), torch.ones(0, 3, 4))
        torch.dot(torch.ones(0), torch.ones(0))
        torch._int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8))
    assert not mode.failures, mode.failures
    assert "aten._int_mm.default" in mode.seen


def test_linear_backward() -> None:
    x, grad, weight = torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(5, 4)
    out = [(2, 3, 4), (5, 4), (5,)]
    expected = (grad @ weight, grad.flatten(0, 1).mT @ x.flatten(0, 1), grad.sum((0, 1)))
    with jax.enable_x64(True):
        results = matmul.linear_backward(
            to_jax(x), to_jax(grad), to_jax(weight), [True, True, True]
        )
    for got, want, shape in zip(results, expected, out):
        assert got.shape == shape
        torch.testing.assert_close(to_torch(got), want)


def test_scaled_mm() -> None:
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    for sa, sb in (
        (torch.tensor(0.5), torch.tensor(2.0)),
        (torch.rand(16, 1) + 0.5, torch.rand(1, 16) + 0.5),
    ):
        expected = ((a.double() * sa) @ (b.double() * sb)).to(BF16)
        args = (a, b.contiguous(), sa, sb, None, None, BF16, False)
        actual = _call("aten._scaled_mm.default", args, (16, 16), BF16)
        torch.testing.assert_close(actual, expected)


def test_precision_follows_torch_and_the_override() -> None:
    assert precision_name() == torch.get_float32_matmul_precision() == "highest"
    with precision("medium"):
        assert matmul_precision() == lax.Precision.DEFAULT
        with precision("high"):
            assert matmul_precision() == lax.Precision.HIGH
    assert matmul_precision() == lax.Precision.HIGHEST
    with pytest.raises(ValueError, match="'fast'"), precision("fast"):
        pass


def test_operands_are_contracted_where_they_lie() -> None:
    """No transpose and no broadcast around the product, and float32 sums of bfloat16."""
    a = jax.ShapeDtypeStruct((4, 8), np.dtype(jax.numpy.bfloat16))
    b = jax.ShapeDtypeStruct((8, 5), np.dtype(jax.numpy.bfloat16))
    jaxpr = jax.make_jaxpr(matmul.mm)(a, b)
    assert [e.primitive.name for e in jaxpr.eqns] == ["dot_general"]
    assert jaxpr.out_avals[0].dtype == np.float32


@pytest.mark.parametrize("beta", [0, 0.5])
@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm", "baddbmm", "addr"])
def test_infinite_factors_times_an_alpha_of_zero(name: str, beta: float) -> None:
    """BLAS does not read them; the ops that are no call of BLAS make NaN."""
    shapes = {"addmm": "mm", "addmv": "mv", "addbmm": "bb", "baddbmm": "bb", "addr": "vv"}[name]
    sizes = {"m": (2, 2), "v": (2,), "b": (3, 2, 2)}
    x = torch.ones(sizes["v" if name == "addmv" else "b" if name == "baddbmm" else "m"])
    a, b = (torch.full(sizes[s], float("inf")) for s in shapes)
    call = getattr(torch, name)
    result = call(x.to("tpu"), a.to("tpu"), b.to("tpu"), alpha=0, beta=beta)
    torch.testing.assert_close(result.cpu(), call(x, a, b, alpha=0, beta=beta), equal_nan=True)

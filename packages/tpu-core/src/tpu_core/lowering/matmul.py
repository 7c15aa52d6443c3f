"""Matrix and vector products.

Every product is one ``dot_general`` that contracts the dims where they lie: no operand is
transposed or broadcast first, but for large weight gradients on a CPU (`_transposed_mm`). 16-bit
floats accumulate in float32 and are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from tpu_core.array_types import Float, Inexact, Int8, Int32, Integer, Num, Shaped
from tpu_core.dtypes import cast, op_math, to_numpy_dtype
from tpu_core.lowering.precision import precision_of
from tpu_core.lowering.registry import lowering

_MM = (((1,), (0,)), ((), ()))
_BMM = (((2,), (1,)), ((0,), (0,)))


def contract(a: jax.Array, b: jax.Array, dims: Any, accumulate: Any = None) -> jax.Array:
    """``dot_general`` at PyTorch's precision, its result still in the accumulating dtype.

    Example:
        >>> contract(a, b, (((1,), (0,)), ((), ())))  # a @ b for two matrices
    """
    accumulate = op_math(a.dtype) if accumulate is None else accumulate
    return lax.dot_general(
        a, b, dims, precision=precision_of(a.dtype), preferred_element_type=accumulate
    )


def _blas_scale_add(product: Array, x: Array, beta: Any, alpha: Any) -> Array:
    """`_scale_add` of a GEMM or GEMV: BLAS reads no factor where ``alpha`` is 0, NaN included."""
    return _scale_add(jnp.zeros_like(product) if alpha == 0 else product, x, beta, alpha)


def _scale_add(product: Array, x: Array, beta: Any, alpha: Any) -> Array:
    """``beta * x + alpha * product``; a zero ``beta`` ignores ``x``, NaN included, as BLAS does."""
    if alpha != 1:
        product = product * cast(alpha, product.dtype)
    if beta == 0:
        return product
    x = cast(x, product.dtype)
    return product + (x if beta == 1 else x * cast(beta, product.dtype))


# Multiplications below which a product is over before a transpose would pay.
_LARGE = 2**24


def moved(x: Num[Array, "rows columns"]) -> Num[Array, "columns rows"]:
    """The transposed matrix, moved in memory by a loop of its own.

    XLA would fold the transpose into a product that uses it, or fuse it with what uses it: on a CPU
    both are slower than the copy. ``x`` must come out of a barrier too.
    """
    return lax.optimization_barrier(lax.transpose(x, (1, 0)))


def _transposed_mm(a: Num[Array, "m k"], b: Num[Array, "k n"]) -> Num[Array, "m n"]:
    """``a @ b`` on a CPU, where ``a`` is the transpose of what lies in memory.

    XLA:CPU multiplies such operands at half the speed of others. Moving the smaller part costs
    little: ``a`` itself, or ``b`` and the result, as ``a @ b`` is the transpose of ``b.T @ a.T``.
    """
    (m, k), n = a.shape, b.shape[1]
    # Together, so that nothing is moved long before the product and kept until then.
    in_memory, b = lax.optimization_barrier((lax.transpose(a, (1, 0)), b))
    if k * m <= k * n + m * n:
        return contract(moved(in_memory), b, _MM)
    return moved(lax.optimization_barrier(contract(moved(b), in_memory, _MM)))


@lowering("aten.mm.default")
def mm(
    a: Num[Array, "m k"], b: Num[Array, "k n"], *, contiguous: Sequence[bool] = (True, True)
) -> Num[Array, "m n"]:
    large = a.shape[0] * a.shape[1] * b.shape[1] >= _LARGE
    if large and not contiguous[0] and a.dtype == np.float32:
        return lax.platform_dependent(
            a, b, cpu=_transposed_mm, default=lambda a, b: contract(a, b, _MM)
        )
    return contract(a, b, _MM)


@lowering("aten.mm.dtype")
def mm_dtype(
    a: Num[Array, "m k"], b: Num[Array, "k n"], out_dtype: torch.dtype
) -> Num[Array, "m n"]:
    return contract(a, b, _MM, to_numpy_dtype(out_dtype))


@lowering("aten.bmm.default")
def bmm(a: Num[Array, "batch m k"], b: Num[Array, "batch k n"]) -> Num[Array, "batch m n"]:
    return contract(a, b, _BMM)


@lowering("aten.bmm.dtype")
def bmm_dtype(
    a: Num[Array, "batch m k"], b: Num[Array, "batch k n"], out_dtype: torch.dtype
) -> Num[Array, "batch m n"]:
    return contract(a, b, _BMM, to_numpy_dtype(out_dtype))


@lowering("aten.addmm.default", static=("beta", "alpha"))
def addmm(
    x: Any, a: Num[Array, "m k"], b: Num[Array, "k n"], *, beta: Any = 1, alpha: Any = 1
) -> Num[Array, "m n"]:
    result = _blas_scale_add(contract(a, b, _MM), x, beta, alpha)
    return jnp.broadcast_to(result, (a.shape[0], b.shape[1]))


@lowering("aten.addmm.dtype", static=("beta", "alpha"))
def addmm_dtype(
    x: Any,
    a: Num[Array, "m k"],
    b: Num[Array, "k n"],
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Num[Array, "m n"]:
    return _blas_scale_add(contract(a, b, _MM, to_numpy_dtype(out_dtype)), x, beta, alpha)


@lowering("aten._addmm_activation.default", static=("beta", "alpha"))
def addmm_activation(
    x: Any,
    a: Num[Array, "m k"],
    b: Num[Array, "k n"],
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
) -> Num[Array, "m n"]:
    """GELU is the tanh approximation on CUDA and exact on the CPU (``Blas.cpp``); exact here."""
    y = _blas_scale_add(contract(a, b, _MM), x, beta, alpha)
    return jax.nn.gelu(y, approximate=False) if use_gelu else jnp.maximum(y, jnp.zeros((), y.dtype))


@lowering("aten.baddbmm.default", static=("beta", "alpha"))
def baddbmm(
    x: Any, a: Num[Array, "batch m k"], b: Num[Array, "batch k n"], *, beta: Any = 1, alpha: Any = 1
) -> Num[Array, "batch m n"]:
    return _scale_add(contract(a, b, _BMM), x, beta, alpha)


@lowering("aten.baddbmm.dtype", static=("beta", "alpha"))
def baddbmm_dtype(
    x: Any,
    a: Num[Array, "batch m k"],
    b: Num[Array, "batch k n"],
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Num[Array, "batch m n"]:
    return _scale_add(contract(a, b, _BMM, to_numpy_dtype(out_dtype)), x, beta, alpha)


@lowering("aten.addbmm.default", static=("beta", "alpha"))
def addbmm(
    x: Any, a: Num[Array, "batch m k"], b: Num[Array, "batch k n"], *, beta: Any = 1, alpha: Any = 1
) -> Num[Array, "m n"]:
    """The sum over the batch is one more contracted dim."""
    return _blas_scale_add(contract(a, b, (((0, 2), (0, 1)), ((), ()))), x, beta, alpha)


@lowering("aten.addmv.default", static=("beta", "alpha"))
def addmv(
    x: Any, a: Num[Array, "m n"], v: Num[Array, " n"], *, beta: Any = 1, alpha: Any = 1
) -> Num[Array, " m"]:
    return _blas_scale_add(contract(a, v, _MM), x, beta, alpha)


@lowering("aten.addr.default", static=("beta", "alpha"))
def addr(
    x: Any, u: Shaped[Array, " m"], v: Shaped[Array, " n"], *, beta: Any = 1, alpha: Any = 1
) -> Shaped[Array, "m n"]:
    if u.dtype == np.bool_ and v.dtype == np.bool_ and x.dtype == np.bool_:
        # ATen's LinearAlgebra.cpp: and/or in place of times/plus.
        outer = u[:, None] & v[None, :] if alpha else jnp.zeros((u.size, v.size), np.bool_)
        return outer | x if beta else outer
    dtype = op_math(jnp.promote_types(jnp.promote_types(u.dtype, v.dtype), x.dtype))
    outer = cast(u, dtype)[:, None] * cast(v, dtype)[None, :]
    return _scale_add(outer, x, beta, alpha)


@lowering("aten.mv.default")
def mv(a: Num[Array, "m n"], v: Num[Array, " n"]) -> Num[Array, " m"]:
    return contract(a, v, _MM)


@lowering("aten.dot.default")
def dot(a: Num[Array, " n"], b: Num[Array, " n"]) -> Num[Array, ""]:
    return contract(a, b, (((0,), (0,)), ((), ())))


@lowering("aten.vdot.default")
def vdot(a: Num[Array, " n"], b: Num[Array, " n"]) -> Num[Array, ""]:
    return dot(jnp.conj(a), b)


@lowering("aten.linear_backward.default")
def linear_backward(
    x: Inexact[Array, "*batch columns"],
    grad: Inexact[Array, "*batch rows"],
    weight: Inexact[Array, "rows columns"],
    output_mask: list[bool],
) -> tuple[
    Inexact[Array, "*batch columns"] | None,
    Inexact[Array, "rows columns"] | None,
    Inexact[Array, " rows"] | None,
]:
    lead = tuple(range(x.ndim - 1))
    grad_x = contract(grad, weight, (((x.ndim - 1,), (0,)), ((), ()))) if output_mask[0] else None
    if not (output_mask[1] or output_mask[2]):
        return grad_x, None, None
    grad_weight = contract(grad, x, ((lead, lead), ((), ())))
    return grad_x, grad_weight, jnp.sum(cast(grad, op_math(grad.dtype)), axis=lead)


@lowering("aten._int_mm.default")
def int_mm(a: Integer[Array, "m k"], b: Integer[Array, "k n"]) -> Int32[Array, "m n"]:
    return contract(a, b, _MM, np.int32)


@lowering("aten._weight_int8pack_mm.default")
def weight_int8pack_mm(
    x: Float[Array, "m k"], weight: Int8[Array, "n k"], scales: Float[Array, " n"]
) -> Float[Array, "m n"]:
    """``x @ weight.T * scales`` ; int8 is exact in every float."""
    y = contract(x, cast(weight, x.dtype), (((1,), (1,)), ((), ())))
    return y * cast(scales, y.dtype)


def _widen_float8(x: Array) -> Array:
    """Every 8-bit float is exact in bfloat16, which all TPUs multiply.

    XLA:GPU would see a product of 8-bit floats, whose sums have some 14 bits on tensor cores.
    """
    wide = cast(x, jnp.bfloat16)
    return lax.platform_dependent(wide, cuda=lax.optimization_barrier, default=lambda y: y)


@lowering("aten._scaled_mm.default")
def scaled_mm(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    scale_a: Array,
    scale_b: Array,
    bias: Float[Array, " n"] | None = None,
    scale_result: Array | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: Any,
) -> Float[Array, "m n"]:
    """One scale a tensor, or one a row of ``a`` and a column of ``b``."""
    y = contract(_widen_float8(a), _widen_float8(b), _MM)
    for scale in (scale_a, scale_b):
        y = y * cast(scale if scale.size > 1 else scale.reshape(()), y.dtype)
    if bias is not None:
        y = y + cast(bias, y.dtype)
    if scale_result is not None and np.dtype(out[0].dtype).itemsize == 1:
        y = y * (1 / cast(scale_result.reshape(()), y.dtype))
    return y


@lowering("aten._scaled_mm_v2.default")
def scaled_mm_v2(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    scale_a: Sequence[Array],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Array],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Float[Array, " n"] | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    out: Any,
) -> Float[Array, "m n"]:
    """Op behind `torch.nn.functional.scaled_mm`; recipes are those of `scaled_mm`."""
    return scaled_mm(a, b, scale_a[0], scale_b[0], bias, out=out)


@lowering("aten._trilinear.default")
def trilinear(
    a: Num[Array, " ..."],
    b: Num[Array, " ..."],
    c: Num[Array, " ..."],
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Num[Array, " ..."]:
    """Sum over some dims of the product of three tensors, each given dims of size 1 first."""
    operands = [
        jnp.expand_dims(x, tuple(dims)) for x, dims in ((a, expand1), (b, expand2), (c, expand3))
    ]
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    given: list[Any] = []
    for x in operands:
        kept = [d for d, n in enumerate(x.shape) if n == shape[d]]
        given += [lax.squeeze(x, [d for d in range(x.ndim) if d not in kept]), kept]
    rest = [d for d in range(len(shape)) if d not in sumdim]
    dtype = op_math(a.dtype)
    return jnp.einsum(*given, rest, precision=precision_of(a.dtype), preferred_element_type=dtype)

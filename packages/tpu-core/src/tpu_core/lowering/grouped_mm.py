"""Grouped products: each group of rows is multiplied by a matrix of its own, as experts are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from tpu_core.array_types import Float, Int, Int32
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.implementations import Target
from tpu_core.lowering.kernel_costs import KernelCost
from tpu_core.lowering.matmul import contract
from tpu_core.lowering.precision import precision_of
from tpu_core.lowering.registry import lowering

_BMM = (((2,), (1,)), ((0,), (0,)))
# libtpu's kernel takes whole rows of tiles.
_SUBLANES = 8
# On a CPU: rows of a product, and multiplications below which a loop over groups does not pay.
_BLOCK = 64
_LARGE = 2**24
_PASSES = {lax.Precision.HIGHEST: 6, lax.Precision.HIGH: 3}


@lowering("aten._grouped_mm.default")
def grouped_mm(
    a: Float[Array, " ..."],
    b: Float[Array, " ..."],
    offs: Int[Array, " groups"] | None = None,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
    *,
    contiguous: Sequence[bool] = (True, True),
) -> Float[Array, " ..."]:
    """One product a group; ``offs`` holds each group's end along the dim that is grouped.

    A 3-D operand holds its groups in dim 0. Two 2-D operands are grouped along the contracted dim.
    Rows past the last offset are undefined in PyTorch and zero here.
    """
    if offs is None:
        return contract(a, b, _BMM)
    sizes = group_sizes(offs)
    if a.ndim == b.ndim == 2:
        rows = min(a.shape[1], b.shape[0])  # those past the last offset may be more on one side
        return _columns(a[:, :rows], b[:rows], sizes)
    if a.ndim == 2:
        return _rows(a, b, sizes, contiguous[1])
    # Grouped along the columns, and so along the rows of the transposed product.
    return _rows(b.T, a.swapaxes(1, 2), sizes, not contiguous[0]).T


def group_sizes(offs: Int[Array, " groups"]) -> Int32[Array, " groups"]:
    """Length of each group, ``int32``, from their ends."""
    return jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(np.int32)


def _is_large(multiplications: int, groups: int) -> bool:
    """Return whether masking the rows of each group, and multiplying them all, takes long."""
    return multiplications * groups >= _LARGE


# --- rows in groups


def _rows(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups k n"],
    sizes: Int32[Array, " groups"],
    as_it_lies: bool,
) -> Float[Array, "rows n"]:
    """Products of groups of rows; ``w`` may be the transpose of what lies in memory."""
    if Target.current().platform == "tpu":
        return _native_rows(x, w, sizes)
    if not _is_large(x.shape[0] * w.shape[1] * w.shape[2], w.shape[0]):
        return _ragged_rows(x, w, sizes)

    def by_blocks(x: Array, w: Array, sizes: Array) -> Array:
        return _rows_by_blocks(x, w, sizes, as_it_lies)

    return lax.platform_dependent(x, w, sizes, cpu=by_blocks, default=_ragged_rows)


def _ragged_rows(
    x: Float[Array, "rows k"], w: Float[Array, "groups k n"], sizes: Int32[Array, " groups"]
) -> Float[Array, "rows n"]:
    return cast(_ragged_product(x, w, sizes, op_math(x.dtype)), x.dtype)


def _native_rows(
    x: Float[Array, "rows k"], w: Float[Array, "groups k n"], sizes: Int32[Array, " groups"]
) -> Float[Array, "rows n"]:
    """As libtpu has a kernel for; else it masks the rows of each group and multiplies them all."""
    dtype, rows = x.dtype, x.shape[0]
    if dtype == np.float16:  # which the kernel does not compile for
        x, w = cast(x, np.float32), cast(w, np.float32)
    products = 2 * rows * w.shape[1] * w.shape[2]
    with jax.named_scope(KernelCost(products, _PASSES.get(precision_of(x.dtype), 1)).scope):
        filled = jnp.pad(x, ((0, -rows % _SUBLANES), (0, 0)))
        # The kernel sums in float32 whatever the result's dtype is.
        y = _ragged_product(filled, w, sizes, x.dtype)
    return cast(y[:rows], dtype)


def _ragged_product(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups k n"],
    sizes: Int32[Array, " groups"],
    dtype: Any,
) -> Float[Array, "rows n"]:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    return lax.ragged_dot_general(
        x, w, sizes, numbers, precision_of(x.dtype), preferred_element_type=dtype
    )


def _rows_by_blocks(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups k n"],
    sizes: Int32[Array, " groups"],
    as_it_lies: bool,
) -> Float[Array, "rows n"]:
    rows, n = x.shape[0], w.shape[2]
    if not as_it_lies:
        w = w.swapaxes(1, 2)
    dims = (((1,), (0 if as_it_lies else 1,)), ((), ()))

    def step(group: Array, at: Array, is_its_own: Array, out: Array) -> Array:
        block = lax.dynamic_slice_in_dim(x, at, len(is_its_own))
        y = contract(block, lax.dynamic_index_in_dim(w, group, keepdims=False), dims)
        held = lax.dynamic_slice_in_dim(out, at, len(is_its_own))
        y = jnp.where(is_its_own[:, None], cast(y, out.dtype), held)
        return lax.dynamic_update_slice_in_dim(out, y, at, 0)

    return _by_blocks(rows, sizes, step, jnp.zeros((rows, n), x.dtype))


# --- the contracted dim in groups


def _columns(
    a: Float[Array, "k rows"], b: Float[Array, "rows n"], sizes: Int32[Array, " groups"]
) -> Float[Array, "groups k n"]:
    """A product for each group of the contracted dim."""
    if not _is_large(a.shape[0] * b.shape[0] * b.shape[1], sizes.shape[0]):
        return _ragged_columns(a, b, sizes)
    return lax.platform_dependent(a, b, sizes, cpu=_columns_by_blocks, default=_ragged_columns)


def _ragged_columns(
    a: Float[Array, "k rows"], b: Float[Array, "rows n"], sizes: Int32[Array, " groups"]
) -> Float[Array, "groups k n"]:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
    y = lax.ragged_dot_general(
        a, b, sizes, numbers, precision_of(a.dtype), preferred_element_type=op_math(a.dtype)
    )
    return cast(y, a.dtype)


def _columns_by_blocks(
    a: Float[Array, "k rows"], b: Float[Array, "rows n"], sizes: Int32[Array, " groups"]
) -> Float[Array, "groups k n"]:
    (k, rows), n = a.shape, b.shape[1]
    x = a.T  # the gradient of a weight has its transpose for an operand

    def step(group: Array, at: Array, is_its_own: Array, out: Array) -> Array:
        # Both sides are masked: zero times what is not a number is none either.
        left, right = (
            jnp.where(is_its_own[:, None], lax.dynamic_slice_in_dim(o, at, len(is_its_own)), 0)
            for o in (x, b)
        )
        y = contract(left, right, (((0,), (0,)), ((), ())))
        held = lax.dynamic_index_in_dim(out, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, held + y, group, 0)

    start = jnp.zeros((sizes.shape[0], k, n), op_math(a.dtype))
    return cast(_by_blocks(rows, sizes, step, start), a.dtype)


def _by_blocks(
    rows: int,
    sizes: Int32[Array, " groups"],
    step: Callable[[Array, Array, Array, Array], Array],
    start: Array,
) -> Any:
    """Go through the rows of each group in blocks of one length.

    Args:
        rows: Number of rows.
        sizes: Rows of each group.
        step: Called with group, first row of a block, which of its rows are the group's own and
            new, and what the last step returned.
        start: Operand of the first step.
    """
    length = min(_BLOCK, rows)
    ends = jnp.cumsum(sizes, dtype=np.int32)
    blocks = -(-sizes // length)
    last = jnp.cumsum(blocks, dtype=np.int32)

    def body(i: Array, carry: Array) -> Array:
        group = jnp.searchsorted(last, i, side="right").astype(np.int32)
        done = i - (last[group] - blocks[group])
        first = ends[group] - sizes[group] + done * np.int32(length)
        at = jnp.minimum(first, np.int32(rows - length))
        row = at + lax.iota(np.int32, length)
        return step(group, at, (row >= first) & (row < ends[group]), carry)

    return lax.fori_loop(np.int32(0), last[-1], body, start)

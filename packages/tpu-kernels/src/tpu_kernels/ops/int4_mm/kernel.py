"""The kernel of products with weights of 4 bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_core.array_types import BFloat16, Float32, Int32
from tpu_kernels.ops.int4_mm.layout import BIAS, CHUNK, EXPONENTS, MASK, MIDDLE, PLACES, WORDS

KERNEL = "int4_mm"
_HALF, _FLOAT32 = jnp.bfloat16, np.dtype(np.float32)
# Chunks of a step: as many as rows of scales that can be read at any step.
_CHUNKS = 8
# Up to so many rows it is cheaper to scale their products than the weight. Groups then bound how
# much a matrix unit sums, which costs half of those of v6e where there are many rows.
_FEW = 128
_ROWS, _COLUMNS = 512, (512, 1024)
_OFFSET = BIAS + MIDDLE


def int4_mm(
    x: BFloat16[Array, "rows columns"],
    packed: Int32[Array, "columns//8 n"],
    group: int,
    scales_and_zeros: BFloat16[Array, "columns//{group} n 2"],
) -> BFloat16[Array, "rows n"]:
    """The product of rows with a packed weight.

    Args:
        x: The rows.
        packed: See `tpu_kernels.ops.int4_mm.layout`.
        group: Columns of a scale: 32, 64 or 128.
        scales_and_zeros: Of the weight's groups.
    """
    rows, columns = x.shape
    n = packed.shape[1]
    step = min(columns, _CHUNKS * CHUNK)
    missing = -columns % step
    # What is behind the end of the weight is multiplied by these zeros.
    x = jnp.pad(x, ((0, 0), (0, missing)))
    # As libtpu has them in memory: a scale and its zero are in the same 32 bits.
    pairs = scales_and_zeros.transpose(0, 2, 1)
    pairs = jnp.pad(pairs, ((0, missing // group), (0, 0), (0, 0)))
    steps, groups = x.shape[1] // step, len(pairs)
    few = rows <= _FEW
    block_rows, block_n = min(rows, _ROWS), min(n, _COLUMNS[not few])

    def of_rows(m: Any, j: Any, k: Any) -> tuple[Any, ...]:
        return m, 0

    sums = _sums(x, group) if few else None
    sums_spec = None if sums is None else pl.BlockSpec((block_rows, sums.shape[1]), of_rows)
    made: Array = pl.pallas_call(
        functools.partial(_few if few else _many, group=group),
        grid=(pl.cdiv(rows, block_rows), pl.cdiv(n, block_n), steps),
        in_specs=[
            pl.BlockSpec((block_rows, step), lambda m, j, k: (m, k)),
            sums_spec,
            pl.BlockSpec((step // 8, block_n), lambda m, j, k: (k, j)),
            pl.BlockSpec((groups, 2, block_n), lambda m, j, k: (0, 0, j)),
        ],
        out_specs=pl.BlockSpec((block_rows, block_n), lambda m, j, k: (m, j)),
        out_shape=jax.ShapeDtypeStruct((rows, n), _HALF),
        scratch_shapes=[
            pltpu.VMEM((block_rows, block_n), _FLOAT32),
            pltpu.VMEM((groups, block_n), _FLOAT32),
            pltpu.VMEM((groups, block_n), _FLOAT32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name=KERNEL,
    )(x, sums, packed, pairs)
    return made


def _sums(
    x: BFloat16[Array, "rows columns"], group: int
) -> BFloat16[Array, "rows 6*columns//{group}"]:
    """Factors of scales, then zeros, beside the numbers: sums of groups, as exact as float32.

    ``x @ ((128 + number) - 136) * scale + zero`` is the product of the first part, which is the
    matrix unit's, and a product of the sums of `x`, here in three parts of bfloat16.
    """
    sums = x.reshape(len(x), -1, group).astype(_FLOAT32).sum(2)
    return jnp.concatenate([part for s in (-_OFFSET * sums, sums) for part in _parts(s)], 1)


def _parts(x: Float32[Array, "rows groups"]) -> list[BFloat16[Array, "rows groups"]]:
    parts = []
    for _ in range(3):
        parts.append(x.astype(_HALF))
        x = x - parts[-1].astype(_FLOAT32)
    return parts


def _numbers(words: Int32[Array, "words n"]) -> BFloat16[Array, "8*words n"]:
    """``128 + number`` in bfloat16, of the words of a chunk."""
    places = []
    for i in range(PLACES):
        halves = lax.shift_right_logical(words, np.int32(4 * i)) if i else words
        bits = (halves & np.int32(MASK)) | np.int32(EXPONENTS)
        places.append(pltpu.bitcast(bits, _HALF))
    return jnp.concatenate(places, 0)


def _scales_and_zeros(
    pairs_ref: Any,
) -> tuple[Float32[Array, "groups n"], Float32[Array, "groups n"]]:
    pairs = pltpu.bitcast(pairs_ref[...], np.int32)[:, 0]
    halves = pairs << np.int32(16), pairs & np.int32(-(2**16))
    scales, zeros = (lax.bitcast_convert_type(half, _FLOAT32) for half in halves)
    return scales, zeros


def _step(x_ref: Any, group: int) -> tuple[int, Any]:
    """Chunks of a step, and the rows of the step's scales."""
    width = x_ref.shape[1]
    groups = width // group
    first = pl.program_id(2) * groups
    return width // CHUNK, pl.ds(pl.multiple_of(first, groups), groups)


def _dot(
    a: BFloat16[Array, "rows columns"], b: BFloat16[Array, "columns n"]
) -> Float32[Array, "rows n"]:
    return jnp.dot(a, b, preferred_element_type=_FLOAT32)


def _few(
    x_ref: Any,
    sums_ref: Any,
    packed_ref: Any,
    pairs_ref: Any,
    out_ref: Any,
    total_ref: Any,
    wide_ref: Any,
    _: Any,
    *,
    group: int,
) -> None:
    """For few rows: scales what is summed over a group."""

    @pl.when(pl.program_id(2) == 0)
    def start() -> None:
        wide_ref[...], added = _scales_and_zeros(pairs_ref)
        scales, zeros = wide_ref[...].astype(_HALF), added.astype(_HALF)
        sums = sums_ref[...]
        half = sums.shape[1] // 2
        total_ref[...] = _dot(sums[:, :half], jnp.concatenate([scales] * 3, 0)) + _dot(
            sums[:, half:], jnp.concatenate([zeros] * 3, 0)
        )

    chunks, of_step = _step(x_ref, group)
    scales = wide_ref[of_step, :]
    total = total_ref[...]
    for chunk in range(chunks):
        numbers = _numbers(packed_ref[chunk * WORDS : (chunk + 1) * WORDS])
        for first in range(0, CHUNK, group):
            column = chunk * CHUNK + first
            product = _dot(x_ref[:, column : column + group], numbers[first : first + group])
            row = column // group
            total += product * scales[row : row + 1]
    total_ref[...] = total
    _finish(total_ref, out_ref)


def _many(
    x_ref: Any,
    sums_ref: None,
    packed_ref: Any,
    pairs_ref: Any,
    out_ref: Any,
    total_ref: Any,
    wide_ref: Any,
    added_ref: Any,
    *,
    group: int,
) -> None:
    """For many rows: makes the weight, so that a product is over a whole step."""

    @pl.when(pl.program_id(2) == 0)
    def start() -> None:
        scales, zeros = _scales_and_zeros(pairs_ref)
        wide_ref[...], added_ref[...] = scales, zeros - _OFFSET * scales
        total_ref[...] = jnp.zeros_like(total_ref)

    chunks, of_step = _step(x_ref, group)
    scales, added = wide_ref[of_step, :], added_ref[of_step, :]
    parts = []
    for chunk in range(chunks):
        numbers = _numbers(packed_ref[chunk * WORDS : (chunk + 1) * WORDS]).astype(_FLOAT32)
        for first in range(0, CHUNK, group):
            row = (chunk * CHUNK + first) // group
            part = numbers[first : first + group] * scales[row : row + 1] + added[row : row + 1]
            parts.append(part.astype(_HALF))
    total_ref[...] += _dot(x_ref[...], jnp.concatenate(parts, 0))
    _finish(total_ref, out_ref)


def _finish(total_ref: Any, out_ref: Any) -> None:
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def end() -> None:
        out_ref[...] = total_ref[...].astype(_HALF)

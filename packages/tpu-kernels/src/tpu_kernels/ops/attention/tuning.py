"""Attention's kernels with blocks of a given size, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpu_kernels.ops.attention import lengths
from tpu_kernels.ops.attention.blocks import BlockGrid
from tpu_kernels.ops.attention.flash_backward import Scores
from tpu_kernels.ops.attention.overloads import KERNEL_FORWARD, KERNEL_OF_KEYS, KERNEL_OF_QUERY
from tpu_kernels.tuning.table import Block

KERNELS = (KERNEL_FORWARD, KERNEL_OF_QUERY, KERNEL_OF_KEYS)
_SIDES = (128, 256, 512, 1024)
# Larger ones spill registers: a block of 1024 x 1024 takes as long as four of half the sides, or
# longer.
_LARGEST = 512 * 1024
CANDIDATES: tuple[Block, ...] = tuple(
    (r, c) for r in _SIDES for c in _SIDES if r * c <= _LARGEST and max(r, c) <= 2 * min(r, c)
)
# Several blocks of the largest size, so that each kernel has a first, a last and other steps.
_LENGTH = 4096


def program(
    dtype: str, size: int, value_size: int, block: Block
) -> tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]:
    """A function that has all three kernels, and what it takes.

    Args:
        dtype: Of the operands.
        size, value_size: Of a head of the query and of the value.
        block: Rows and columns.
    """
    of = Scores(BlockGrid(_LENGTH, _LENGTH, *block, is_causal=True), size**-0.5, None)

    def all_three(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> Any:
        operands = q, k, v, None
        out, sums = lengths.forward(operands, None, of)
        known = *operands, grad, out, sums
        return out, lengths.of_query(known, None, of), lengths.of_key_and_value(known, None, of)

    q, v = (jax.ShapeDtypeStruct((1, 2, _LENGTH, n), dtype) for n in (size, value_size))
    return all_three, (q, q, v, v)

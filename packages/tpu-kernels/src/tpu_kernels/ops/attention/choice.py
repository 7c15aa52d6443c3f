"""Selection of block sizes for attention's kernels: those whose measured cost is the least for the
lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from tpu_kernels.ops.attention.blocks import LANES, BlockGrid
from tpu_kernels.ops.attention.overloads import KERNEL_OF_KEYS
from tpu_kernels.tuning import table
from tpu_kernels.tuning.bundles import Bundles
from tpu_kernels.tuning.chips import CHIPS

OP = "attention"
# Head sizes that are measured; others take up as much of the chip as the next larger.
HEAD_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
# Bytes of a head above which blocks have 256 rows and columns: random numbers take some hundred
# instructions a score, which are laid out one after the other.
_DRAWING = 513


def shape(dtype: str, size: int, value_size: int) -> str:
    """The key of the table for head sizes."""
    return f"{dtype}/{size}/{value_size}"


@functools.lru_cache(1024)
def blocks(
    kernel: str,
    kind: str | None,
    dtype: str,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    is_causal: bool,
    *,
    has_bias: bool = False,
    has_dropout: bool = False,
) -> BlockGrid:
    """The blocks of a call.

    Args:
        kernel: As a profile shows it, of `tpu_kernels.ops.attention.overloads`.
        kind: Generation of the chips, where it is known.
        dtype: Of the operands.
        lengths: Of queries and keys.
        sizes: Of a head of the query and of the value.
        is_causal: Whether a query meets keys up to its own place only.
        has_bias: Whether a mask or bias takes up memory beside the scores; its blocks were not
            measured.
        has_dropout: Whether random numbers are drawn, which makes a block's program longer.
    """
    itemsize = 2 if dtype == "bfloat16" else 4
    default = BlockGrid.of(*lengths, max(sizes) * itemsize, is_causal)
    if has_dropout:
        return BlockGrid.of(*lengths, max(max(sizes) * itemsize, _DRAWING), is_causal)
    if kind is None or has_bias or lengths[0] < LANES:
        return default
    costs = next(filter(None, (table.find(OP, kind, s) for s in _shapes(dtype, sizes))), {})
    found = best(kernel, kind, dtype, lengths, sizes, is_causal, costs.get(kernel, {}))
    return default if found is None else found[0]


def best(
    kernel: str,
    kind: str,
    dtype: str,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    is_causal: bool,
    costs: Mapping[table.Block, Bundles],
) -> tuple[BlockGrid, float] | None:
    """The blocks that cost the least, and how many cycles for a head; None without any.

    Args:
        kernel, kind, dtype, lengths, sizes, is_causal: As of `blocks`.
        costs: Of blocks of each size.
    """
    chip = CHIPS.get(table.chip_name(kind))
    if chip is None or not costs:
        return None
    traffic = sum(sizes) * (2 if dtype == "bfloat16" else 4) / chip.bytes_a_cycle
    cycles = {}
    for (rows, columns), cost in costs.items():
        tried = BlockGrid(*lengths, rows, columns, is_causal)
        cycles[tried] = estimate(kernel, tried, cost, traffic)
    return min(cycles.items(), key=lambda item: item[1])


def estimate(kernel: str, blocks: BlockGrid, cost: Bundles, traffic: float) -> float:
    """Cycles for a head.

    Args:
        kernel: As a profile shows it, of `tpu_kernels.ops.attention.overloads`.
        blocks: Of the scores.
        cost: Of a block.
        traffic: Cycles that the memory takes for what a step reads, a row of it.
    """
    met = blocks.computed // (blocks.block_rows * blocks.block_columns)
    if kernel == KERNEL_OF_KEYS:
        outer, steps = blocks.column_blocks, blocks.column_blocks * blocks.row_blocks
        read = blocks.block_rows * traffic
    else:
        outer, steps = blocks.row_blocks, blocks.row_blocks * blocks.seen_column_blocks
        read = blocks.block_columns * traffic
    return met * max(cost.block, read) + steps * cost.step + outer * cost.once


def _shapes(dtype: str, sizes: tuple[int, int]) -> Iterator[str]:
    """Keys of the table, the nearest first."""
    yield shape(dtype, *sizes)
    for size, value_size in HEAD_SIZES:
        if size >= sizes[0] and value_size >= sizes[1]:
            yield shape(dtype, size, value_size)

"""Blocks of queries and keys of a call, and the selection of those to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Float32

LANES = 128
# Rows of a tile of bfloat16; float32 needs 8.
_SUBLANES = 16
# Blocks may add this share of the length, as padding.
_WASTE = 8


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


def _block(length: int, largest: int) -> int:
    """Size of a block: the largest that pads little."""
    least = _rounded(length, LANES)
    size = largest
    while size > LANES and _rounded(length, size) > least + least // _WASTE:
        size //= 2
    return size


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """A matrix of scores in blocks.

    Attributes:
        rows, columns: Numbers of queries and keys.
        block_rows, block_columns: Of a block. Queries and keys are filled up to multiples of them.
        is_causal: Whether a query meets keys up to its own place only.
    """

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    is_causal: bool

    @classmethod
    def of(cls, rows: int, columns: int, row_bytes: int, is_causal: bool) -> BlockGrid:
        """Blocks of a size that suits the lengths.

        Args:
            rows, columns: Numbers of queries and keys.
            row_bytes: Of a query or key, the larger.
            is_causal: See the attribute.
        """
        # A block of keys serves as many operations a byte as there are bfloat16 queries in a block.
        # 512 are what the chips' memory asks for (v5e 240, v6e 560); larger blocks compute more
        # above the diagonal. All of these sizes fit into 16 MiB of vector memory, masks included.
        largest = 512 if row_bytes <= 512 else 256 if row_bytes <= 1024 else 128
        short = rows < LANES
        block_rows = _rounded(rows, _SUBLANES) if short else _block(rows, largest)
        return cls(rows, columns, block_rows, _block(columns, largest), is_causal)

    @property
    def padded_rows(self) -> int:
        return _rounded(self.rows, self.block_rows)

    @property
    def padded_columns(self) -> int:
        return _rounded(self.columns, self.block_columns)

    @property
    def row_blocks(self) -> int:
        return self.padded_rows // self.block_rows

    @property
    def column_blocks(self) -> int:
        return self.padded_columns // self.block_columns

    @property
    def seen_column_blocks(self) -> int:
        """Blocks of keys up to the last that a query meets."""
        seen = min(self.rows, self.columns) if self.is_causal else self.columns
        return -(-seen // self.block_columns)

    @property
    def computed(self) -> int:
        """Number of scores that are computed."""
        ends = range(self.block_rows, self.padded_rows + 1, self.block_rows)
        count = sum(
            min(-(-end // self.block_columns), self.column_blocks)
            if self.is_causal
            else self.column_blocks
            for end in ends
        )
        return count * self.block_rows * self.block_columns

    def runs(self, i: Any, j: Any) -> Any:
        """Return whether block ``(i, j)`` has scores that count."""
        return j * self.block_columns < (i + 1) * self.block_rows if self.is_causal else True

    def column_block(self, i: Any, j: Any) -> Any:
        """The block of keys to fetch for ``(i, j)``: one that is there already if none counts."""
        if not self.is_causal:
            return j
        last = lax.div((i + 1) * self.block_rows - 1, self.block_columns)
        return jnp.minimum(j, jnp.minimum(last, self.column_blocks - 1))

    def row_block(self, i: Any, j: Any) -> Any:
        """The block of queries to fetch for ``(i, j)``."""
        if not self.is_causal:
            return i
        first = lax.div(j * self.block_columns, self.block_rows)
        return jnp.minimum(jnp.maximum(i, first), self.row_blocks - 1)

    def masked(
        self, scores: Float32[Array, "rows columns"], i: Any, j: Any, *, row_axis: int = 0
    ) -> Float32[Array, "rows columns"]:
        """The scores of block ``(i, j)``, minus infinity where they do not count."""
        # Of no more queries than keys, those that are there meet no key that is not.
        covered = self.is_causal and self.rows <= self.columns
        is_padded = self.padded_columns != self.columns and not covered
        if not self.is_causal and not is_padded:
            return scores
        place = lax.broadcasted_iota(np.int32, scores.shape, 1 - row_axis)
        column = j * self.block_columns + place
        if self.is_causal:
            row = i * self.block_rows + lax.broadcasted_iota(np.int32, scores.shape, row_axis)
            scores = jnp.where(row >= column, scores, -jnp.inf)
        return jnp.where(column < self.columns, scores, -jnp.inf) if is_padded else scores

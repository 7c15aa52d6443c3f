"""``flex_attention`` over the blocks that a block mask names: a loop over them, tile by tile.

Neither scores nor probabilities are ever there in full; a row's maximum and sum are corrected as
its tiles come (FlashAttention). Blocks that are not named cost nothing, in backward neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_compile.flex_scores import Indices, ScoreGraphs
from tpu_core.extend import cast, contract

QUERY_KEY = (((3,), (3,)), ((0, 1), (0, 1)))  # [B,H,M,E] x [B,H,N,E] -> [B,H,M,N]
SCORE_VALUE = (((3,), (2,)), ((0, 1), (0, 1)))  # [B,H,M,N] x [B,H,N,E] -> [B,H,M,E]
SCORE_QUERY = (((2,), (2,)), ((0, 1), (0, 1)))  # [B,H,M,N] x [B,H,M,E] -> [B,H,N,E]


@dataclass(frozen=True)
class BlockSparsity:
    """Tiles of scores that a block mask keeps.

    A row is one block of queries, of the sequences and heads that share an entry of the mask; rows
    are numbered with the block of queries last.

    Attributes:
        batch, heads: Sizes of these dims of the mask: 1 for all, or one entry for each.
        rows: Blocks of queries.
        size: Queries and keys of a block.
        shape: Of the scores, ``[B, H, M, N]``.
        partial: Blocks of keys to which the mask applies, for each row.
        count: All blocks of keys, for each row.
        order: Their numbers, ``[rows, count at most]``; those to which the mask applies first.
    """

    batch: int
    heads: int
    rows: int
    size: tuple[int, int]
    shape: tuple[int, ...]
    partial: jax.Array
    count: jax.Array
    order: jax.Array

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return math.ceil(self.shape[3] / self.size[1])

    def tiles(self, x: jax.Array, dim: int, fill: float | None = None) -> jax.Array:
        """``[B, H, L, ...]`` as ``[rows or columns, B', H', block, ...]``.

        Args:
            x: The array to cut.
            dim: 0 if ``L`` is queries, 1 if it is keys.
            fill: Filling of the last block: a number, or the last element.
        """
        block = self.size[dim]
        count = math.ceil(x.shape[2] / block)
        missing = [(0, 0)] * x.ndim
        missing[2] = (0, count * block - x.shape[2])
        if fill is None:
            x = jnp.pad(x, missing, mode="edge")
        else:
            x = jnp.pad(x, missing, constant_values=fill)
        b, h, _, *rest = x.shape
        split = (self.batch, b // self.batch, self.heads, h // self.heads, count, block)
        x = x.reshape(*split, *rest)
        x = jnp.moveaxis(x, (0, 2, 4), (0, 1, 2))
        return x.reshape(-1, *x.shape[3:])

    def untile(self, tiles: jax.Array, length: int) -> jax.Array:
        """The reverse of `tiles`."""
        _, b, h, block, *rest = tiles.shape
        x = tiles.reshape(self.batch, self.heads, -1, b, h, block, *rest)
        x = jnp.moveaxis(x, (0, 1, 2), (0, 2, 4))
        return x.reshape(self.batch * b, self.heads * h, -1, *rest)[:, :, :length]

    def column(self, row: Any, turn: Any) -> jax.Array:
        """Number of the tile of keys that a row reads at its turn."""
        return row // self.rows * self.columns + self.order[row, turn]

    def where(self, row: Any, turn: Any) -> tuple[Indices, jax.Array]:
        """A tile's indices, and which of its keys there are."""
        b, h, queries, keys = self.shape
        entry = row // self.rows
        each = b // self.batch, h // self.heads
        starts = entry // self.heads * each[0], entry % self.heads * each[1]
        first = row % self.rows * self.size[0], self.order[row, turn] * self.size[1]
        m, n = (start + np.arange(s, dtype=np.int32) for start, s in zip(first, self.size))
        at = [start + np.arange(s, dtype=np.int32) for start, s in zip(starts, each)]
        # Beyond the end the last ones stand again, so that nothing is read that is not there.
        return [*at, jnp.minimum(m, queries - 1), jnp.minimum(n, keys - 1)], n < keys


def blocks_of(block_mask: Sequence[Any], shape: tuple[int, ...]) -> BlockSparsity | None:
    """The tiles that a block mask names, None if there is but one.

    Args:
        block_mask: As of PyTorch's operator: ``BlockMask.as_tuple()``.
        shape: Of the scores, ``[B, H, M, N]``.
    """
    _, _, partial, indices, full, full_indices = block_mask[:6]
    size = int(block_mask[-3]), int(block_mask[-2])
    rows = math.ceil(shape[2] / size[0])
    if rows * math.ceil(shape[3] / size[1]) <= 1:
        return None
    batch, heads = partial.shape[:2]
    partial, indices = partial[..., :rows].reshape(-1), indices[:, :, :rows]
    order, count = indices.reshape(partial.size, -1), partial
    if full is not None:
        full = full[..., :rows].reshape(-1)
        full_indices = full_indices[:, :, :rows].reshape(full.size, -1)
        turn = np.arange(order.shape[1] + full_indices.shape[1], dtype=np.int32)
        both = jnp.concatenate((order, full_indices), 1)
        # After the last of the partial ones come the full ones.
        at = jnp.where(turn < partial[:, None], turn, turn - partial[:, None] + order.shape[1])
        order = jnp.take_along_axis(both, at, 1, mode="clip")
        count = partial + full
    return BlockSparsity(batch, heads, rows, size, shape, partial, count, order)


def _scores(
    graphs: ScoreGraphs,
    blocks: BlockSparsity,
    q: jax.Array,
    k: jax.Array,
    scale: float,
    row: Any,
    turn: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, Indices]:
    """A tile's scores before ``score_mod`` and after the mask, the mask, and the indices."""
    at, exists = blocks.where(row, turn)
    raw = contract(q, k, QUERY_KEY) * scale
    mask = (graphs.mask(at) | (turn >= blocks.partial[row])) & exists
    return raw, jnp.where(mask, graphs.changed(raw, at), -np.inf), mask, at


def forward(
    graphs: ScoreGraphs,
    blocks: BlockSparsity,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention ``[B, H, M, E]`` and, ``[B, H, M]``, the scores' log of the sum and maximum.

    Args:
        graphs: Of the scores.
        blocks: The tiles.
        query: ``[B, H, M, E]``.
        key, value: ``[B, H, N, E]``.
        scale: Factor of the scores before ``score_mod``.
    """
    keys, values = blocks.tiles(key, 1), blocks.tiles(value, 1)

    def one_row(_: None, item: Any) -> tuple[None, Any]:
        row, q = item

        def one_tile(turn: jax.Array, state: Any) -> Any:
            out, total, highest = state
            k, v = (
                lax.dynamic_index_in_dim(x, blocks.column(row, turn), 0, False)
                for x in (keys, values)
            )
            scores = _scores(graphs, blocks, q, k, scale, row, turn)[1]
            top = jnp.maximum(highest, jnp.max(scores, -1))
            base = jnp.where(top == -np.inf, 0, top)
            weights = jnp.exp(scores - base[..., None])
            factor = jnp.exp(highest - base)
            part = contract(cast(weights, value.dtype), v, SCORE_VALUE)
            total = total * factor + jnp.sum(weights, -1)
            return out * factor[..., None] + part, total, top

        lead = q.shape[:3]
        wide = jnp.promote_types(query.dtype, np.float32)
        start = (
            jnp.zeros((*lead, value.shape[3]), wide),
            jnp.zeros(lead, wide),
            jnp.full(lead, -np.inf, wide),
        )
        out, total, highest = lax.fori_loop(0, blocks.count[row], one_tile, start)
        seen = jnp.where(total == 0, 1, total)
        log_total = jnp.where(total == 0, -np.inf, jnp.log(seen) + highest)
        return None, (out / seen[..., None], log_total, highest)

    rows = np.arange(blocks.count.size, dtype=np.int32)
    _, made = lax.scan(one_row, None, (rows, blocks.tiles(query, 0)))
    out, log_total, highest = (blocks.untile(x, query.shape[2]) for x in made)
    return out, log_total, highest


def backward(
    graphs: ScoreGraphs,
    blocks: BlockSparsity,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    grad_out: jax.Array,
    log_total: jax.Array,
    delta: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array | None, ...]]:
    """Gradients of query, key, value and of the buffers.

    Args:
        graphs, blocks, query, key, value, scale: As of `forward`.
        grad_out: Of its result.
        log_total: Its log of the sum, ``[B, H, M]``.
        delta: Part of a probability's gradient to subtract, ``[B, H, M]``.
    """
    keys, values = blocks.tiles(key, 1), blocks.tiles(value, 1)
    wide = jnp.promote_types(query.dtype, np.float32)

    def one_row(sums: Any, item: Any) -> tuple[Any, jax.Array]:
        row, q, g, logs, off = item

        def one_tile(turn: jax.Array, state: Any) -> Any:
            grad_q, grad_k, grad_v, captured = state
            column = blocks.column(row, turn)
            k, v = (lax.dynamic_index_in_dim(x, column, 0, False) for x in (keys, values))
            raw, scores, mask, at = _scores(graphs, blocks, q, k, scale, row, turn)
            weights = jnp.where(logs[..., None] == -np.inf, 0, jnp.exp(scores - logs[..., None]))
            change = weights * (contract(g, v, QUERY_KEY) - off[..., None])
            grads, shares = graphs.gradients(raw, at, change)
            grads = cast(jnp.where(mask, grads * scale, 0), query.dtype)
            grad_q = grad_q + contract(grads, k, SCORE_VALUE)
            grad_k = grad_k.at[column].add(contract(grads, q, SCORE_QUERY))
            grad_v = grad_v.at[column].add(contract(cast(weights, query.dtype), g, SCORE_QUERY))
            captured = jax.tree.map(jnp.add, captured, shares)
            return grad_q, grad_k, grad_v, captured

        start = (jnp.zeros(q.shape, wide), *sums)
        grad_q, *sums = lax.fori_loop(0, blocks.count[row], one_tile, start)
        return tuple(sums), grad_q

    # Their dtypes, without computing any.
    at, _ = blocks.where(np.int32(0), np.int32(0))
    tile = jax.ShapeDtypeStruct((*values.shape[1:3], *blocks.size), wide)
    captured = jax.eval_shape(lambda s: graphs.gradients(s, at, s)[1], tile)
    zeros = jax.tree.map(lambda c: jnp.zeros(c.shape, c.dtype), captured)
    start = jnp.zeros(keys.shape, wide), jnp.zeros(values.shape, wide), zeros
    items = (
        np.arange(blocks.count.size, dtype=np.int32),
        blocks.tiles(query, 0),
        blocks.tiles(grad_out, 0, 0.0),
        blocks.tiles(log_total, 0, -np.inf),
        blocks.tiles(delta, 0, 0.0),
    )
    (grad_k, grad_v, captured), grad_q = lax.scan(one_row, start, items)
    length = key.shape[2]
    return (
        blocks.untile(grad_q, query.shape[2]),
        blocks.untile(grad_k, length),
        blocks.untile(grad_v, length),
        captured,
    )

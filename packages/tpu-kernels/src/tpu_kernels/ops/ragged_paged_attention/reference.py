"""Ragged paged attention, one sequence after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tpu_core.array_types import Float, Int
from tpu_kernels.ops.paged_attention.reference import probabilities
from tpu_kernels.ops.registry import Implementation

PLAIN = Implementation(
    "plain",
    "Computes the scores of all tokens with the keys of one sequence after the other.",
)


def ragged_paged_attention(
    query: Float[Array, "tokens heads head_size"],
    pages: Float[Array, "pages page_size combined_heads head_size"],
    lengths: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    starts: Int[Array, " sequences+1"],
    count: Int[Array, " 1"],
    scale: float,
    softcap: float,
    window: int,
) -> Float[Array, "tokens heads head_size"]:
    """See `tpu_kernels.ragged_paged_attention`. Scores and sums are float32, or float64."""
    tokens, heads, size = query.shape
    key_heads = pages.shape[2] // 2
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(tokens, key_heads, heads // key_heads, size)
    token = jnp.arange(tokens)

    def sequence(
        i: Int[Array, ""], out: Float[Array, "tokens key_heads group head_size"]
    ) -> Float[Array, "tokens key_heads group head_size"]:
        own = pages[jnp.clip(page_indices[i], 0, len(pages) - 1)].astype(query.dtype)
        own = own.reshape(-1, key_heads, 2, size)
        column = jnp.arange(len(own))
        # What is in a page behind the sequence's end may be anything.
        values = jnp.where((column < lengths[i])[:, None, None], own[:, :, 1], 0)
        scores = jnp.einsum("tkge,ske->tkgs", grouped, own[:, :, 0], preferred_element_type=wide)
        place = lengths[i] - starts[i + 1] + token
        counts = column <= place[:, None]
        if window:
            counts = counts & (column > place[:, None] - window)
        shares = probabilities(scores, scale, softcap, counts[:, None, None])
        new = jnp.einsum(
            "tkgs,ske->tkge", shares.astype(query.dtype), values, preferred_element_type=wide
        )
        is_own = (token >= starts[i]) & (token < starts[i + 1])
        return jnp.where(is_own[:, None, None, None], new, out)

    out = lax.fori_loop(0, count[0], sequence, jnp.zeros(grouped.shape, wide))
    return out.reshape(query.shape).astype(query.dtype)

"""Paged attention by gathered pages, products and a softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tpu_core.array_types import Bool, Float, Int, Shaped
from tpu_kernels.ops.registry import Implementation

PLAIN = Implementation(
    "plain",
    "Gathers the pages of each sequence, so that memory grows with the longest one.",
)


def probabilities(
    scores: Float[Array, "*batch keys"],
    scale: float,
    softcap: float,
    counts: Bool[Array, "*#batch keys"],
) -> Float[Array, "*batch keys"]:
    """The softmax of the scores that count along the last dimension; 0 where none does."""
    scores = scores * jnp.asarray(scale, scores.dtype)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(counts, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    shares = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = shares.sum(axis=-1, keepdims=True)
    return shares / jnp.where(total == 0, 1, total)


def paged_attention(
    query: Float[Array, "sequences heads head_size"],
    key_pages: Float[Array, "key_heads pages page_size head_size"],
    value_pages: Float[Array, "key_heads pages page_size head_size"],
    lengths: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    scale: float,
    softcap: float,
) -> Float[Array, "sequences heads head_size"]:
    """See `tpu_kernels.paged_attention`. Scores and sums are in float32, or in float64."""
    key_heads, pages, page, size = key_pages.shape
    sequences, heads, _ = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    places = jnp.clip(page_indices, 0, pages - 1)

    def gathered(
        x: Shaped[Array, "key_heads pages page_size head_size"],
    ) -> Shaped[Array, "sequences key_heads keys head_size"]:
        return x[:, places].swapaxes(0, 1).reshape(sequences, key_heads, -1, size)

    grouped = query.reshape(sequences, key_heads, heads // key_heads, size)
    scores = lax.dot_general(
        grouped,
        gathered(key_pages).astype(query.dtype),
        (((3,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type=wide,
    )
    counts = jnp.arange(scores.shape[3]) < lengths[:, None, None, None]
    shares = probabilities(scores, scale, softcap, counts)
    out = lax.dot_general(
        shares.astype(query.dtype),
        # What is in a page behind the sequence's end may be anything.
        jnp.where(counts.swapaxes(2, 3), gathered(value_pages), 0).astype(query.dtype),
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=wide,
    )
    return out.reshape(query.shape).astype(query.dtype)

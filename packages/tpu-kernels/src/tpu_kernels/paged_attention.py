"""Attention for serving, over a cache of keys and values in pages."""

from __future__ import annotations

import math

import torch

from tpu_core.array_types import Float, Integer
from tpu_kernels.decorator import jax_op
from tpu_kernels.ops.paged import check_integers
from tpu_kernels.ops.paged_attention.reference import paged_attention as plain

_op = jax_op("tpu_kernels::paged_attention", plain, differentiable=False)


def paged_attention(
    query: Float[torch.Tensor, "sequences heads head_size"],
    key_pages: Float[torch.Tensor, "key_heads pages page_size head_size"],
    value_pages: Float[torch.Tensor, "key_heads pages page_size head_size"],
    lengths: Integer[torch.Tensor, " sequences"],
    page_indices: Integer[torch.Tensor, "sequences pages_per_sequence"],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Float[torch.Tensor, "sequences heads head_size"]:
    """Attention of one query a sequence over keys and values that lie in pages.

    A step of decoding: the cache of all sequences is one array of pages, and each sequence knows
    which of them are its own. There is no gradient.

    Args:
        query: ``(sequences, heads, head size)``, on device ``tpu``.
        key_pages: ``(key heads, pages, page size, head size)``. As many heads of the query, in
            order, share a head of the keys. A page in use holds numbers to its end.
        value_pages: As ``key_pages``.
        lengths: ``(sequences,)``, integers: the keys of each sequence. Where it is 0 the result is.
        page_indices: ``(sequences, pages of a sequence)``, integers: its pages in order. What
            stands behind the pages that a sequence's length needs does not matter.
        scale: Of the scores; one over the root of the head size unless given.
        softcap: Scores are ``softcap * tanh(scores / softcap)`` unless it is 0.

    Returns:
        Of the shape and dtype of ``query``.

    Raises:
        TypeError: Lengths or indices are no integers.
        ValueError: The shapes do not fit each other.

    Example:
        >>> out = tpu_kernels.paged_attention(q, cache.keys, cache.values, lengths, cache.places)
    """
    _check(query, key_pages, value_pages, lengths, page_indices)
    out: torch.Tensor = _op(
        query,
        key_pages,
        value_pages,
        lengths.to(torch.int32),
        page_indices.to(torch.int32),
        1.0 / math.sqrt(query.size(2)) if scale is None else float(scale),
        float(softcap),
    )
    return out


def _check(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
) -> None:
    if query.dim() != 3 or key_pages.dim() != 4 or key_pages.shape != value_pages.shape:
        raise ValueError(
            "paged_attention takes query (sequences, heads, head size), and key_pages and "
            "value_pages (key heads, pages, page size, head size), not "
            f"{tuple(query.shape)}, {tuple(key_pages.shape)} and {tuple(value_pages.shape)}."
        )
    check_integers("paged_attention", lengths=lengths, page_indices=page_indices)
    sequences, heads, size = query.shape
    if key_pages.size(3) != size or heads % key_pages.size(0):
        raise ValueError(
            f"paged_attention: query has {heads} heads of size {size}, and key_pages "
            f"{key_pages.size(0)} of size {key_pages.size(3)}: sizes have to be equal, and the "
            "heads of the query a multiple of the others."
        )
    if lengths.shape != (sequences,) or page_indices.dim() != 2 or len(page_indices) != sequences:
        raise ValueError(
            f"paged_attention: for {sequences} sequences lengths is ({sequences},) and "
            f"page_indices ({sequences}, pages of a sequence), not {tuple(lengths.shape)} and "
            f"{tuple(page_indices.shape)}."
        )

"""Attention for serving, of prompts and of single tokens at once."""

from __future__ import annotations

import math

import torch

from tpu_core.array_types import Float, Integer
from tpu_kernels.decorator import jax_op
from tpu_kernels.ops.paged import check_integers
from tpu_kernels.ops.ragged_paged_attention.reference import ragged_paged_attention as plain

_op = jax_op("tpu_kernels::ragged_paged_attention", plain, differentiable=False)


def ragged_paged_attention(
    query: Float[torch.Tensor, "tokens heads head_size"],
    pages: Float[torch.Tensor, "pages page_size combined_heads head_size"],
    lengths: Integer[torch.Tensor, " sequences"],
    page_indices: Integer[torch.Tensor, "sequences pages_per_sequence"],
    starts: Integer[torch.Tensor, " sequences+1"],
    count: Integer[torch.Tensor, " 1"] | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> Float[torch.Tensor, "tokens heads head_size"]:
    """Causal attention of the new tokens of many sequences over keys and values in pages.

    The new tokens, whole prompts or one token of a sequence, stand one after the other; their keys
    and values are in the pages already. A token meets the keys of its sequence up to its own. There
    is no gradient.

    Args:
        query: ``(tokens, heads, head size)``, on device ``tpu``.
        pages: ``(pages, page size, 2 * key heads, head size)``: the keys of a head, then its
            values. As many heads of the query, in order, share a head of the keys. A page in use
            holds numbers to its end.
        lengths: ``(sequences,)``, integers: keys of each sequence, those of its new tokens
            included.
        page_indices: ``(sequences, pages of a sequence)``, integers: its pages in order.
        starts: ``(sequences + 1,)``, integers: the first token of each sequence, and the end. Each
            sequence has a token at least.
        count: ``(1,)``, integer: how many of the sequences there are; all unless given. What is
            said of the others, and tokens behind the last one's, do not matter.
        scale: Of the scores; one over the root of the head size unless given.
        softcap: Scores are ``softcap * tanh(scores / softcap)`` unless it is 0.
        window: A token meets this many keys at most, its own included; all for 0.

    Returns:
        Of the shape and dtype of ``query``; 0 for tokens of no sequence.

    Raises:
        TypeError: Lengths, indices, starts or the count are no integers.
        ValueError: The shapes do not fit each other, or ``window`` is negative.

    Example:
        >>> out = tpu_kernels.ragged_paged_attention(q, cache.pages, lengths, places, starts)
    """
    _check(query, pages, lengths, page_indices, starts, count)
    if window < 0:
        raise ValueError(
            f"ragged_paged_attention: window is {window}. Give the number of keys that a token "
            "meets, or 0 for all."
        )
    if count is None:
        count = torch.full((1,), len(lengths), dtype=torch.int32, device=query.device)
    out: torch.Tensor = _op(
        query,
        pages,
        lengths.to(torch.int32),
        page_indices.to(torch.int32),
        starts.to(torch.int32),
        count.to(torch.int32),
        1.0 / math.sqrt(query.size(2)) if scale is None else float(scale),
        float(softcap),
        int(window),
    )
    return out


def _check(
    query: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    starts: torch.Tensor,
    count: torch.Tensor | None,
) -> None:
    if query.dim() != 3 or pages.dim() != 4 or pages.size(2) % 2:
        raise ValueError(
            "ragged_paged_attention takes query (tokens, heads, head size) and pages (pages, page "
            f"size, 2 * key heads, head size), not {tuple(query.shape)} and {tuple(pages.shape)}."
        )
    key_heads = pages.size(2) // 2
    if pages.size(3) != query.size(2) or not key_heads or query.size(1) % key_heads:
        raise ValueError(
            f"ragged_paged_attention: query has {query.size(1)} heads of size {query.size(2)}, and "
            f"pages {key_heads} of size {pages.size(3)}: sizes have to be equal, and the heads of "
            "the query a multiple of the others."
        )
    check_integers(
        "ragged_paged_attention",
        lengths=lengths,
        page_indices=page_indices,
        starts=starts,
        count=count,
    )
    n = lengths.numel()
    sized = lengths.dim() == 1 and page_indices.dim() == 2 and len(page_indices) == n
    if not sized or starts.shape != (n + 1,) or (count is not None and count.shape != (1,)):
        raise ValueError(
            f"ragged_paged_attention: for {n} sequences page_indices is ({n}, pages of a sequence),"
            f" lengths ({n},), starts ({n + 1},) and count (1,), not {tuple(page_indices.shape)}, "
            f"{tuple(lengths.shape)}, {tuple(starts.shape)} and "
            f"{None if count is None else tuple(count.shape)}."
        )

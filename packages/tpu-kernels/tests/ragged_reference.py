"""What ragged paged attention is, for tests to compare with."""

from __future__ import annotations

import torch


def expected(
    arguments: list[torch.Tensor],
    count: int,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Ragged paged attention, one token after the other.

    Args:
        arguments: Queries, pages, lengths of sequences, their pages, and where their tokens start.
        count: How many sequences there are.
        scale: Of scores; one over the root of the head's size unless given.
        softcap: Of scores; 0 for none.
        window: How many keys a token sees; 0 for all.

    Returns:
        The result in float64.
    """
    query, pages, lengths, places, starts = arguments
    query, pages = query.double(), pages.double()
    out = torch.zeros_like(query)
    for i in range(count):
        keys = pages[places[i]].flatten(0, 1)
        for token in range(int(starts[i]), int(starts[i + 1])):
            end = int(lengths[i]) - int(starts[i + 1]) + token + 1
            first = max(0, end - window) if window else 0
            k, v = (keys[first:end, j::2] for j in (0, 1))
            k, v = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (k, v))
            scores = torch.einsum("he,she->hs", query[token], k) * (scale or query.size(2) ** -0.5)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out[token] = torch.einsum("hs,she->he", scores.softmax(1), v)
    return out

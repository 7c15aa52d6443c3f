"""Comparison of what ranks send in an all_to_all with what the others expect.

That is a number for each pair of ranks. Only two sums of them, weighted by pair, travel with the
message by which ranks agree; the numbers themselves are exchanged where the sums differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import torch

# As in `differences`.
_EXPLAIN_SECONDS = 2.0
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements, by the other rank.

    Attributes:
        sent: To each rank.
        expected: From each rank.
    """

    sent: tuple[int, ...]
    expected: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Sizes:
        """Those of tensors that are sent and filled."""
        return cls(tuple(x.numel() for x in inputs), tuple(x.numel() for x in outputs))

    def fingerprints(self, rank: int) -> tuple[int, int]:
        """Of what is sent and what is expected, of 64 bits each.

        Their sums over all ranks are equal where every rank expects what is sent to it. Elsewhere
        they differ: always for one pair, and with a probability of 1 - 2**-50 or so for several.
        """
        to, source = _weights(rank, len(self.sent))
        return _sum(self.sent, to), _sum(self.expected, source)


def _sum(numbers: Sequence[int], weights: np.ndarray[Any, Any]) -> int:
    return int((np.array(numbers, np.int64) * weights).sum())  # modulo 2**64


@lru_cache(maxsize=64)
def _weights(rank: int, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Odd numbers of 64 bits for the pairs (rank, i), and for the pairs (i, rank)."""
    others = np.arange(size, dtype=np.uint64)
    own = np.full(size, rank, np.uint64)
    return _mixed(own, others), _mixed(others, own)


def _mixed(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """SplitMix64 (Steele, Lea and Flood, 2014) of pairs of numbers below 2**32."""
    z = (first << np.uint64(32) | second) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def exchange(store: Any, key: str, rank: int, size: int, own: Sizes) -> dict[int, Sizes]:
    """The sizes of each rank; a rank that does not say is left out.

    Args:
        store: Of the group.
        key: Of this comparison alone.
        rank: Of this process.
        size: Number of processes.
        own: Sizes of this one.
    """
    store.set(f"{key}/{rank}", json.dumps([own.sent, own.expected]))
    by_rank = {}
    for r in range(size):
        with contextlib.suppress(RuntimeError):  # one that is gone is left out
            store.wait([f"{key}/{r}"], timedelta(seconds=_EXPLAIN_SECONDS))
            sent, expected = json.loads(store.get(f"{key}/{r}"))
            by_rank[r] = Sizes(tuple(sent), tuple(expected))
    return by_rank


def differences(by_rank: dict[int, Sizes]) -> dict[str, object]:
    """The first pairs of ranks that disagree, with both numbers.

    Example:
        >>> differences({0: Sizes((1, 3), (1, 2)), 1: Sizes((2, 4), (5, 4))})
        {'rank 0 to rank 1': 'rank 0 sends 3 elements, rank 1 expects 5'}
    """
    found: dict[str, object] = {}
    for a in sorted(by_rank):
        for b in sorted(by_rank):
            sent, expected = by_rank[a].sent[b], by_rank[b].expected[a]
            if sent != expected and len(found) < _MOST_SHOWN:
                found[f"rank {a} to rank {b}"] = (
                    f"rank {a} sends {sent} elements, rank {b} expects {expected}"
                )
    return found

"""Report of differences between programs that ranks declared equal."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

from tpu_core.errors import SpmdMismatchWarning

# How long the others may take to say what they run, once it is known that they differ.
_EXPLAIN_SECONDS = 2.0
_NO_MORE = "nothing more"


def exchange(
    store: Any, key: str, rank: int, size: int, ops: Sequence[str]
) -> dict[int, list[str]]:
    """Ops of each rank in order; a rank that does not answer is left out.

    Args:
        store: Of the group.
        key: Of this comparison alone.
        rank: Of this process.
        size: Number of processes.
        ops: Ops of this rank.
    """
    store.set(f"{key}/{rank}", json.dumps(list(ops)))
    listed = {}
    for r in range(size):
        with contextlib.suppress(RuntimeError):  # one that is gone is left out
            store.wait([f"{key}/{r}"], timedelta(seconds=_EXPLAIN_SECONDS))
            listed[r] = json.loads(store.get(f"{key}/{r}"))
    return listed


def warn(group: str, listed: dict[int, list[str]], line: str | None) -> None:
    """Warn of the first op in which a rank differs from the lowest one."""
    warnings.warn(
        SpmdMismatchWarning(
            f"Ranks of group '{group}' run different programs in spmd().",
            values=first_difference(listed),
            line=line,
        ),
        stacklevel=2,
    )


def first_difference(listed: dict[int, list[str]]) -> dict[str, object]:
    """The first ops that differ, of the lowest rank and of the first one that differs from it.

    Example:
        >>> first_difference({0: ["mul float32[4] at a.py:1"], 1: ["add float32[4] at a.py:2"]})
        {'rank 0': 'mul float32[4] at a.py:1', 'rank 1': 'add float32[4] at a.py:2'}
    """
    lowest = min(listed)
    for rank in sorted(listed):
        for ours, theirs in zip_longest(listed[lowest], listed[rank], fillvalue=_NO_MORE):
            if _without_line(ours) != _without_line(theirs):
                return {f"rank {lowest}": ours, f"rank {rank}": theirs}
    return {"ops": "are the same; which of their results are used afterwards is not"}


def _without_line(op: str) -> str:
    return op.partition(" at ")[0]

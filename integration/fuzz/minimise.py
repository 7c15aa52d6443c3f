"""The smallest program that still fails, by delta debugging; each trial in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .cases import TIERS, Case, Failure, Settings
from .workers import run_alone

T = TypeVar("T")


def without_parts(items: Sequence[T], least: int = 0) -> Iterator[list[T]]:
    """A list without its halves, quarters, ..., single items."""
    size = len(items) // 2 or len(items)
    while size:
        for start in reversed(range(0, len(items), size)):
            kept = [*items[:start], *items[start + size :]]
            if least <= len(kept) < len(items):
                yield kept
        size //= 2


def smaller_numbers(n: int, least: int = 0) -> Iterator[int]:
    """Numbers to try in place of ``n``, smallest first."""
    seen = {n}
    for candidate in (least, least + 1, 2, n // 2, n - 1):
        if least <= candidate < n and candidate not in seen:
            seen.add(candidate)
            yield candidate


def candidates(fuzzer: Any, case: Case) -> Iterator[Case]:
    """Smaller cases; those with simpler tiers first."""
    order = [*TIERS]
    simpler = order[: order.index(case.tiers)] if case.tiers else []
    yield from (replace(case, tiers=tiers) for tiers in simpler)
    yield from (replace(smaller, tiers=case.tiers) for smaller in fuzzer.shrink(case))


def minimise(
    fuzzer: Any,
    history: Sequence[Case],
    failure: Failure,
    settings: Settings,
    *,
    seconds: float = 60.0,
    trial_seconds: float = 30.0,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[tuple[Case, ...], Failure, bool]:
    """Shrink cases that failed when they ran in this order in one process.

    Args:
        fuzzer: Runs and shrinks them.
        history: All that the process had run; the last one failed.
        failure: The failure, which a smaller program must have as well.
        settings: Of the process.
        seconds: Time for all trials.
        trial_seconds: Time for one.
        report: Told about progress.

    Returns:
        The cases, the failure of their last run, whether it fails again at all.
    """
    end = time.monotonic() + seconds
    last = failure

    def fails(cases: Sequence[Case]) -> bool:
        nonlocal last
        if time.monotonic() > end:
            return False
        found = run_alone(fuzzer, cases, settings, trial_seconds)
        if found and found.is_like(failure):
            last = found
            return True
        return False

    # The case alone, else the shortest end of the history.
    best: list[Case] | None = None
    length = 1
    while best is None and length < 2 * len(history):
        cases = list(history[-length:])
        if fails(cases):
            best = cases
        length *= 4
    if best is None:
        return tuple(history[-1:]), failure, False
    smaller = True
    while smaller and len(best) > 1:
        smaller = False
        for kept in without_parts(best[:-1]):
            if fails([*kept, best[-1]]):
                best, smaller = [*kept, best[-1]], True
                break
    report(f"fails with {len(best)} cases")
    smaller = True
    while smaller and time.monotonic() < end:
        smaller = False
        for i in reversed(range(len(best))):
            for candidate in candidates(fuzzer, best[i]):
                if time.monotonic() > end:
                    break
                if fails([*best[:i], candidate, *best[i + 1 :]]):
                    best[i], smaller = candidate, True
                    break
    return tuple(best), last, True

"""Comparison of a segment's ops with those of earlier ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from difflib import SequenceMatcher

_LEAST_IN_A_ROW = 8  # ops that are the same in both, between others that differ


def differing(forms: array[int], others: Sequence[array[int]]) -> list[bool]:
    """Nodes that lie between what begins as most others do and what ends so, as booleans.

    A long row of those in between that most others have too does not differ.
    """
    differs = [False] * len(forms)
    if not others:
        return differs
    starts = [_common(forms, other) for other in others]
    ends = [_common(forms[::-1], other[::-1]) for other in others]
    most = len(others) // 4
    begin, rest = sorted(starts)[most], sorted(ends)[most]
    end = len(forms) - rest
    if begin < end:
        rows = [_row(forms, begin, end, other, begin, len(other) - rest) for other in others]
        for i in range(begin, end):
            differs[i] = sum(i not in row for row in rows) > most
    elif min(starts) < len(forms) and begin != len(forms):
        # Ops were left out, or are repeated: those around the place.
        differs[end:begin] = [True] * (begin - end)
    return differs


def _row(
    forms: array[int], begin: int, end: int, other: array[int], start: int, stop: int
) -> range:
    """The longest row in ``forms[begin:end]`` that ``other[start:stop]`` has too.

    Less than half of what differs is no row: of the rounds of a loop that branches some are alike
    by chance, others in each step.
    """
    least = max(_LEAST_IN_A_ROW, (end - begin) // 2)
    if min(end - begin, stop - start) < least:
        return range(0)
    matcher = SequenceMatcher(None, forms[begin:end], other[start:stop], autojunk=False)
    block = matcher.find_longest_match()
    return range(begin + block.a, begin + block.a + block.size) if block.size >= least else range(0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

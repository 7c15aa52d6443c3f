"""Segments that are compiled again and again: the part that differs is set apart from the rest.

A step may differ in every round in how some ops are called, in a way that no program on padded
arrays serves: a crop that is resized, a different number of pieces that are joined. Compiled as a
whole, each round would be a program to compile, on a TPU some seconds. After `_MOST` compiles for
one line such a segment is run in parts: what differs by PyTorch's CPU kernels, as an op without a
lowering would, and what is before and after it as programs of their own, which are the same each
time or differ in sizes alone. It costs copies to the host and back, and no compile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from tpu_core.compiler.host_parts import may_run_on_host
from tpu_core.compiler.segment import Segment
from tpu_core.padding.recording import form_of_node

Part = tuple[int, int, bool]
"""First node, the node after the last, and whether CPU kernels run them."""

_MOST = 8  # compiles for one line
_MOST_FOR_PARTS = 4  # and for one that ends a part
_MOST_SITES = 256
_MOST_COMPARED = 8  # latest programs of a line
_LEAST_OPS = 16  # that are a program of their own, if none of them is a product
_COMBINE = "tpu.combine_words.default"
PART = "part of a segment that varies"  # why such a segment ends, as pieces.cpp says it


@dataclass(slots=True)
class _Site:
    """The compiles for segments that end at one line.

    Attributes:
        forms: Of the latest ones, the form of each op: its arguments without sizes.
        compiles: How many there were.
        refused: Labels of ops that cannot run on padded arrays.
    """

    forms: deque[list[str]] = field(default_factory=lambda: deque(maxlen=_MOST_COMPARED))
    compiles: int = 0
    refused: set[str] = field(default_factory=set)


class VaryingSegments:
    """Counts compiles by line, and says where a segment is to be divided."""

    def __init__(self) -> None:
        self._sites: OrderedDict[tuple[bool, str, str], _Site] = OrderedDict()

    def compiled(self, s: Segment) -> None:
        """Count a compile."""
        key = _site(s)
        site = self._sites.setdefault(key, _Site())
        self._sites.move_to_end(key)
        site.compiles += 1
        site.forms.append(_forms(s))
        while len(self._sites) > _MOST_SITES:
            self._sites.popitem(last=False)

    def refused(self, s: Segment, op: str) -> None:
        """Take note of an op, by its label, that cannot run on padded arrays."""
        self._sites.setdefault(_site(s), _Site()).refused.add(op)

    def is_due(self, s: Segment) -> bool:
        """Return whether so much was compiled for its line that a segment had better be divided."""
        site = self._sites.get(_site(s))
        return site is not None and site.compiles >= (_MOST_FOR_PARTS if s.cut == PART else _MOST)

    def parts(self, s: Segment) -> list[Part] | None:
        """The parts to run a segment in, or None where none of them may run by CPU kernels."""
        site = self._sites[_site(s)]
        nodes = s.nodes
        if len(nodes) == 1:
            return [(0, 1, True)] if may_run_on_host(nodes[0]) else None
        begin, end = _differing(_forms(s), site.forms)
        differs = [begin <= i < end or n.label in site.refused for i, n in enumerate(nodes)]
        on_host = [d and may_run_on_host(n) for d, n in zip(differs, nodes)]
        if not any(on_host):
            return None
        # A few ops between them are no program of their own.
        for i, j in _runs(on_host, False):
            if (
                j - i < _LEAST_OPS
                and not any(differs[i:j])
                and all(may_run_on_host(n) for n in nodes[i:j])
            ):
                on_host[i:j] = [True] * (j - i)
        # How many words of checks there are differs with the ops: a small program of its own.
        combines = [n.name == _COMBINE for n in nodes]
        kinds = list(zip(on_host, differs, combines))
        bounds = [i for i in range(len(nodes)) if i == 0 or kinds[i] != kinds[i - 1]]
        return [(i, j, on_host[i]) for i, j in pairwise([*bounds, len(nodes)])]


def _site(s: Segment) -> tuple[bool, str, str]:
    # What combines the words of checks has no line.
    last = next((n for n in reversed(s.nodes) if n.line), s.nodes[-1])
    return s.cut == PART, last.line, last.name


def _forms(s: Segment) -> list[str]:
    return [n.name if n.name == _COMBINE else f"{n.name} {form_of_node(n)}" for n in s.nodes]


def _differing(forms: Sequence[str], others: Sequence[Sequence[str]]) -> tuple[int, int]:
    """The nodes between what begins as most others do and what ends so; (0, 0) for none."""
    starts = sorted(_common(forms, other) for other in others)
    ends = sorted(_common(forms[::-1], other[::-1]) for other in others)
    begin, rest = starts[len(starts) // 4], ends[len(ends) // 4]
    end = len(forms) - rest
    if begin < end:
        return begin, end
    # Ops were left out, or are repeated: those around the place.
    return (end, begin) if starts[0] < len(forms) and begin != len(forms) else (0, 0)


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _runs(values: Sequence[bool], kind: bool) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of a value."""
    start = 0
    for value, run in groupby(values):
        length = len(list(run))
        if value is kind:
            yield start, start + length
        start += length

"""Reasons for compiles: the op and argument was new, and against what."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import prod
from typing import Any

from tpu_core.compiler.segment import Node, RuntimeScalar, Segment
from tpu_core.dtypes import dtype_text
from tpu_core.lowering.views import Access
from tpu_core.recorder.plan import PLACES, Blank, NodePlan, Number, Operand, Repeated, _Written

# Arguments of an op as (name, what is compiled in of it): ("mat1", "float32[8, 128]").
Form = tuple[tuple[str, str], ...]

_NUMBER = "a number"  # that is an input of the program
_MEMORY = " with "  # after it: how a tensor lies in memory
_MOST_SHOWN = 3  # arguments in one reason
_MOST_COMPARED = 64  # latest forms of an op, and latest segments, that a new one is compared with


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason for a compile, and the user's line of the op at fault."""

    text: str
    line: str | None


@dataclass(frozen=True, slots=True)
class _Known:
    """Record of a compiled segment."""

    forms: array[int]  # of each node, by the number that it was given at first sight
    operands: list[list[int]]
    live: frozenset[int]
    donated: frozenset[int]


class Reasons:
    """Remembers what was compiled, to say what is new about a segment.

    Threads explain at once, each on tables that others add to: iterations go over copies. A lock
    could not be held, as a finalizer that runs meanwhile may wait for another thread's values.
    """

    def __init__(self) -> None:
        self._forms: dict[str, dict[Form, int]] = {}
        self._names: dict[int, str] = {}  # of each form, by its number
        self._next_number = count()
        self._numbers: dict[str, list[RuntimeScalar]] = {}
        self._latest: deque[_Known] = deque(maxlen=_MOST_COMPARED)
        self._unread: list[Segment] = []  # compiled, not yet in the tables above

    def explain(self, s: Segment) -> Reason:
        """The new part: ``"aten.mm.default: self float32[8, 128] -> float32[8, 131]"``."""
        self._read()
        previous = self._numbers.get(s.key)
        if previous is not None:
            return _changed_number(s, previous)
        for node in s.nodes:
            form, known = form_of(s, node), self._forms.get(node.name, {})
            if form in known:
                continue
            if known:
                return Reason(f"{node.name}: {_difference(form, known)}", node.line or None)
            shown = _shortened([f"{name} {text}" for name, text in form if "[" in text])
            with_what = f", with {shown}" if shown else ""
            return Reason(f"{node.name}: first use{with_what}", node.line or None)
        return self._new_order(s)

    def remember(self, s: Segment) -> None:
        """Count ``s`` among what was compiled."""
        # A program that was loaded may be the only one: its ops are looked at when another comes.
        self._unread.append(s)

    def _read(self) -> None:
        segments, self._unread = self._unread, []
        for s in segments:
            self._numbers[s.key] = s.numbers
            for node in s.nodes:
                known = self._forms.setdefault(node.name, {})
                form = form_of(s, node)
                if form not in known:
                    number = next(self._next_number)
                    self._names[number] = node.name
                    known[form] = number
            self._latest.append(self._known(s))

    def _known(self, s: Segment) -> _Known:
        return _Known(
            array("I", [self._forms[n.name][form_of(s, n)] for n in s.nodes]),
            [n.operands for n in s.nodes],
            frozenset(s.live),
            frozenset(s.donated),
        )

    def _new_order(self, s: Segment) -> Reason:
        """Every op is known as it is; what is new is how they stand together."""
        now, latest = self._known(s), list(self._latest)
        same = [k for k in latest if k.forms == now.forms and k.operands == now.operands]
        if same:
            closest = min(same, key=lambda k: len(k.live ^ now.live) + len(k.donated ^ now.donated))
            return _changed_ends(s, closest)
        what = f"known ops in a new order ({len(s.nodes)} ops, cut at: {s.cut})"
        starts = [_common(k.forms, now.forms) for k in latest]
        ends = [_common(k.forms[::-1], now.forms[::-1]) for k in latest]
        length = max(starts, default=0)
        last = s.nodes[-1].line if s.nodes else None
        if max(ends, default=0) > length:
            return Reason(f"{what}: the last {max(ends)} as in an earlier program", last)
        if length == 0:
            return Reason(what, last or None)
        # Of several, the latest.
        before = latest[len(starts) - 1 - starts[::-1].index(length)].forms
        if length == len(now.forms) == len(before):
            return Reason(f"{what}: as before, but on other values", last or None)
        if length == len(now.forms):
            text = f"ends after {length} of the {len(before)} ops of an earlier program"
            return Reason(f"{what}: {text}", last or None)
        node = s.nodes[length]
        instead = (
            f"where an earlier program had {self._names[before[length]]}"
            if length < len(before)
            else "where an earlier program ended"
        )
        return Reason(f"{what}: op {length + 1} is {node.name}, {instead}", node.line or None)


def form_of(s: Segment, node: Node) -> Form:
    """Arguments that a program fixes: geometry, dtypes, and values that are no inputs."""
    if node.plan is None:
        slot = s.slots[next(i for i in node.outputs if i is not None)]
        return (("size", f"{dtype_text(slot.dtype)}{list(slot.shape)}"),)
    return tuple(_arguments(node.plan))


def listing(s: Segment) -> tuple[tuple[str, str], ...]:
    """The user's line and the op of each node, in order: what a report shows of a program."""
    return tuple(_pair(node.line, node.name.removesuffix(".default")) for node in s.nodes)


# A pair each for the lines of a program, however often it is compiled.
_pairs: dict[tuple[str, str], tuple[str, str]] = {}


def _pair(line: str, op: str) -> tuple[str, str]:
    return _pairs.setdefault((line, op), (line, op))


def _arguments(plan: NodePlan) -> Iterator[tuple[str, str]]:
    writes = iter(plan.writes)

    def walk(name: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, _Written):
            yield name, _geometry(next(writes))
        elif isinstance(value, Operand):
            yield name, _geometry(plan.reads[value.index])
        elif isinstance(value, Number):
            yield name, _NUMBER
        elif isinstance(value, Repeated):
            yield name, f"{value.count} equal numbers"
        elif isinstance(value, Blank):
            yield name, f"{dtype_text(value.aval.dtype)}{list(value.aval.shape)}"
        elif isinstance(value, list) and any(isinstance(v, PLACES) for v in value):
            yield name, f"{len(value)} items"
            for i, item in enumerate(value):
                yield from walk(f"{name}[{i}]", item)
        else:
            yield name, str(value)

    for name, _, value in plan.template:
        yield from walk(name.lstrip("$"), value)


def _geometry(access: Access) -> str:
    memory = []
    if access.strides != _contiguous(access.sizes):
        memory.append(f"strides {list(access.strides)}")
    if prod(access.base_sizes) != prod(access.sizes):
        memory.append(f"storage {list(access.base_sizes)}")
    text = f"{dtype_text(access.dtype)}{list(access.sizes)}"
    return f"{text}{_MEMORY}{', '.join(memory)}" if memory else text


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _difference(form: Form, known: dict[Form, int]) -> str:
    """Difference from the known form most like ``form``; of several, the latest."""
    now = dict(form)

    def likeness(other: Form) -> int:
        pairs = [(text, now[name]) for name, text in other if name in now]
        same = sum(a == b for a, b in pairs)
        same_sizes = sum(a.split(_MEMORY)[0] == b.split(_MEMORY)[0] for a, b in pairs)
        return same + same_sizes - abs(len(other) - len(form))

    # The first of the greatest, and the latest come first.
    latest = list(islice(reversed(known), _MOST_COMPARED))
    closest: Form = max(latest, key=likeness)
    before = dict(closest)
    changes = [
        f"{name} {_change(before[name], text)}"
        for name, text in form
        if name in before and before[name] != text
    ]
    return _shortened(changes) or "other arguments than before"


def _change(before: str, now: str) -> str:
    """Old and new value; what is said of memory only where sizes and dtypes are the same."""
    old, new = before.split(_MEMORY)[0], now.split(_MEMORY)[0]
    return f"{old} -> {new}" if old != new else f"{before} -> {now}"


def _shortened(parts: list[str]) -> str:
    more = len(parts) - _MOST_SHOWN
    return ", ".join(parts[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _common(a: array[int], b: array[int]) -> int:
    """Length of the common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _changed_number(s: Segment, previous: list[RuntimeScalar]) -> Reason:
    for i, (now, before) in enumerate(zip(s.numbers, previous)):
        if now.value != before.value and not now.compiled_in and before.compiled_in:
            node = next(n for n in reversed(s.nodes) if n.numbers <= i)
            text = (
                f"{node.name}: a number that was constant varies, "
                f"{before.value} -> {now.value}; it is a run-time input from now on"
            )
            return Reason(text, node.line or None)
    return Reason("the same program again, which is not in memory any more", s.nodes[-1].line)


def _changed_ends(s: Segment, known: _Known) -> Reason:
    """The same ops on the same values, of which others are read later or held elsewhere."""
    maker = {slot: node for node in s.nodes for slot in node.outputs if slot is not None}
    for slots, what in (
        (frozenset(s.live) - known.live, "is read later, which it was not before"),
        (known.live - frozenset(s.live), "is not read later any more"),
    ):
        if slots:
            node = maker.get(min(slots), s.nodes[-1])
            return Reason(f"same ops as before, but the result of {node.name} {what}", node.line)
    last = s.nodes[-1].line or None
    if known.donated - frozenset(s.donated):
        return Reason("same ops as before, but an input is held elsewhere now", last)
    if frozenset(s.donated) - known.donated:
        return Reason("same ops as before, but memory of an input can be reused now", last)
    return Reason(f"same ops as before, compiled anew ({len(s.nodes)} ops)", last)

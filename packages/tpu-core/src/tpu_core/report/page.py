"""The compile report as an HTML page: one file, with its style and script inside."""

from __future__ import annotations

import functools
import math
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from typing import TYPE_CHECKING

from tpu_core._version import __version__
from tpu_core.errors.base import format_bytes
from tpu_core.report.facts import FIRST_USE, Facts, ProgramFacts
from tpu_core.report.html import template

if TYPE_CHECKING:
    from jinja2 import Template

# Of many programs a page shows the latest, and lists the ops of the latest of those, so that
# browsers open it.
_MOST_PROGRAMS = 500
_MOST_LINES = 20_000


@dataclass(frozen=True)
class ProgramRow:
    """A program as the page shows it.

    Attributes:
        number: Its place among all programs, from 1.
        made: The event and the runs.
        names: Its most frequent ops with their counts, in words.
        lines: (user line, ops in words) in order, or empty if not kept.
        is_first: Whether an op of it was new altogether, so that it is no recompile.
        share: Its time as a fraction of the slowest program's.
        after: Seconds since the first program.
    """

    number: int
    made: ProgramFacts
    names: str
    lines: list[tuple[str, str]]
    is_first: bool
    share: float
    after: float


@dataclass(frozen=True)
class Tick:
    """A mark of the time axis: its place from 0 to 1, and its text."""

    place: float
    text: str


def ticks(span: float) -> list[Tick]:
    """Marks of an axis from 0 to ``span`` seconds, at most six, at round numbers.

    Example:
        >>> [tick.text for tick in ticks(7.5)]
        ['0', '2 s', '4 s', '6 s']
    """
    magnitude = 10.0 ** math.floor(math.log10(span))
    steps = (magnitude * factor for factor in (0.2, 0.5, 1, 2, 5, 10))
    step = next(s for s in steps if span / s <= 5.5)
    count = math.floor(span / step + 1e-9)
    return [Tick(k * step / span, _round(k * step, step)) for k in range(count + 1)]


def _round(value: float, step: float) -> str:
    if not value:
        return "0"
    if step >= 3600:
        return f"{value / 3600:g} h"
    if step >= 60:
        return f"{value / 60:g} min"
    return f"{value:g} s" if step >= 0.1 else f"{value * 1e3:g} ms"


def render(facts: Facts, whole_page: bool) -> str:
    """The page.

    Args:
        facts: Facts to show.
        whole_page: A document for a browser, else a part of one for a notebook.
    """
    programs = _programs(facts)
    span = max(facts.time - programs[0].made.event.time, 1e-3) if programs else 1.0
    return _template().render(
        whole_page=whole_page,
        facts=facts,
        programs=programs,
        hidden=len(facts.programs) - len(programs),
        span=span,
        ticks=ticks(span),
        slowest=max((p.made.event.seconds for p in programs), default=0.0),
        made=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.time)),
        versions=(
            f"tpu-core {__version__}, torch {version('torch')}, jaxlib {version('jaxlib')}, "
            f"Python {platform.python_version()}"
        ),
    )


@functools.cache
def _template() -> Template:
    return template(
        "tpu_core.report", "page.html", seconds=_seconds, bytes=format_bytes, count=_count
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _programs(facts: Facts) -> list[ProgramRow]:
    start = len(facts.programs) - _MOST_PROGRAMS
    shown = list(enumerate(facts.programs, 1))[max(start, 0) :]
    slowest = max((made.event.seconds for _, made in shown), default=0.0) or 1.0
    first = shown[0][1].event.time if shown else 0.0
    left = _MOST_LINES
    found = []
    for number, made in reversed(shown):
        event = made.event
        lines = list(_lines(event.contents)) if left > 0 else []
        left -= len(lines)
        found.append(
            ProgramRow(
                number,
                made,
                _most_frequent(name for _, name in event.contents),
                lines,
                FIRST_USE in event.reason,
                event.seconds / slowest,
                max(event.time - first, 0.0),
            )
        )
    return found[::-1]


def _lines(contents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Ops that follow each other and have one line stand together, repeated ones as a count."""
    for line, pairs in groupby(contents, key=lambda pair: pair[0]):
        names = [
            _times(name, sum(1 for _ in same)) for name, same in groupby(name for _, name in pairs)
        ]
        yield line, ", ".join(names)


def _most_frequent(names: Iterable[str]) -> str:
    counts = Counter(names).most_common()
    return ", ".join(_times(*pair) for pair in counts[:6]) + (", ..." if len(counts) > 6 else "")


def _times(name: str, count: int) -> str:
    name = name.removeprefix("aten.")
    return name if count == 1 else f"{name} x{count}"

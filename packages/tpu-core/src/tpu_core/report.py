"""The compile report: tables that print as text anywhere and as rich tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_core.errors_base import format_bytes

if TYPE_CHECKING:
    from tpu_core.metrics import Metrics

_MOST_ROWS = 20


@dataclass(frozen=True)
class Table:
    """A title, column names and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join([self.title, *(f"  {row}".rstrip() for row in text)])

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            # Text, so that shapes in square brackets are not read as markup.
            table.add_row(*(Text(cell) for cell in row))
        return table


@dataclass(frozen=True)
class Report:
    """Tables of `Metrics.report`. ``print(report)`` gives text, ``rich.print(report)`` colours."""

    tables: list[Table]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables))

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.tables)


def build_report(metrics: Metrics) -> Report:
    """The report of ``metrics`` at this moment; empty tables are left out."""
    count = metrics.snapshot()
    totals = [
        ("compiles", f"{count['compiles']:.0f} in {count['compile_seconds']:.2f} s"),
        ("loaded from disk", _timed(count["cache_hits_disk"], count["disk_load_seconds"])),
        ("found in memory", f"{count['cache_hits_memory']:.0f}"),
        ("programs run", f"{count['executions']:.0f}"),
        ("segments", f"{count['segments']:.0f}"),
        ("ops recorded", f"{count['ops']:.0f}"),
        ("fallbacks to the CPU", _timed(count["fallbacks"], count["fallback_seconds"])),
        ("host syncs", f"{count['host_syncs']:.0f}"),
        ("host to device", f"{count['h2d_count']:.0f}, {format_bytes(count['h2d_bytes'])}"),
        ("device to host", f"{count['d2h_count']:.0f}, {format_bytes(count['d2h_bytes'])}"),
    ]
    if count["debug_checks"]:
        totals.append(("debug checks", f"{count['debug_checks']:.0f}"))
    tables = [Table("Totals", ("what", "count"), totals), *_details(metrics)]
    return Report([table for table in tables if table.rows])


def _details(metrics: Metrics) -> list[Table]:
    events = metrics.compile_events()
    compiles = [
        (f"{e.seconds:.3f}", e.source, str(e.ops), e.line or "", e.reason)
        for e in events[-_MOST_ROWS:]
    ]
    fallbacks = sorted(metrics.fallbacks().items(), key=lambda item: -item[1].seconds)
    syncs = sorted(metrics.host_syncs().items(), key=lambda item: -item[1])
    return [
        Table(
            _title("Compiles", len(events), "latest"),
            ("seconds", "source", "ops", "line", "reason"),
            compiles,
        ),
        Table(
            _title("Fallbacks", len(fallbacks), "slowest"),
            ("op", "count", "seconds", "first line"),
            [(op, str(f.count), f"{f.seconds:.3f}", f.line or "") for op, f in fallbacks][
                :_MOST_ROWS
            ],
        ),
        Table(
            _title("Host syncs", len(syncs), "most frequent"),
            ("reason", "count", "line"),
            [(reason, str(n), line or "") for (reason, line), n in syncs][:_MOST_ROWS],
        ),
    ]


def _title(name: str, length: int, which: str) -> str:
    return name if length <= _MOST_ROWS else f"{name} ({which} {_MOST_ROWS} of {length})"


def _timed(count: float, seconds: float) -> str:
    return f"{count:.0f} in {seconds:.2f} s"

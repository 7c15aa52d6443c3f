"""The compile report: what was compiled and why, as text, as rich tables and as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_core.errors.base import format_bytes
from tpu_core.report.facts import Facts, collect, timed
from tpu_core.report.tables import Table

if TYPE_CHECKING:
    from os import PathLike

    from tpu_core.memory_history import Peak
    from tpu_core.metrics import Metrics

__all__ = ["Report", "Table", "build_report"]

_MOST_ROWS = 20


@dataclass(frozen=True)
class Report:
    """Result of `Metrics.report`: the state at that moment.

    ``print(report)`` gives text and ``rich.print(report)`` colours; a notebook shows the page that
    `save_html` writes.

    Example:
        >>> report = torch.tpu.compile_report()
        >>> print(report)
        >>> report.save_html("compiles.html")
    """

    tables: list[Table]
    facts: Facts = field(repr=False)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables))

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.tables)

    def to_html(self) -> str:
        """The report as one HTML page that needs nothing else: no network, no other file."""
        from tpu_core.report.page import render

        return render(self.facts, whole_page=True)

    def save_html(self, path: str | PathLike[str]) -> Path:
        """Write the page of `to_html`.

        Args:
            path: The file; it is replaced if it exists.

        Returns:
            The absolute path, to be opened in a browser.

        Raises:
            OSError: The file cannot be written.
        """
        file = Path(path).expanduser().absolute()
        file.write_text(self.to_html(), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        from tpu_core.report.page import render

        return render(self.facts, whole_page=False)


def build_report(metrics: Metrics) -> Report:
    """The report of ``metrics`` at this moment; empty tables are left out."""
    facts = collect(metrics)
    tables = [Table("Totals", ("what", "count"), facts.totals), *_details(facts)]
    return Report([table for table in tables if table.rows], facts)


def _details(facts: Facts) -> list[Table]:
    programs, counted = facts.programs, facts.runs_counted
    compiles = [
        (
            f"{p.event.seconds:.3f}",
            p.event.source,
            str(p.event.ops),
            *((timed(p.runs.count, p.runs.seconds),) if counted else ()),
            p.event.cut,
            short(p.event.line),
            p.event.reason,
        )
        for p in programs[-_MOST_ROWS:]
    ]
    return [
        Table(
            _title("Recompile causes", len(facts.causes), "slowest"),
            ("compiles", "seconds", "line", "latest reason"),
            [
                (str(c.count), f"{c.seconds:.3f}", short(c.line), c.reason)
                for c in facts.causes[:_MOST_ROWS]
            ],
        ),
        Table(
            _title("Compiles", len(programs), "latest"),
            (
                "seconds",
                "source",
                "ops",
                *(("runs (host)",) if counted else ()),
                "cut",
                "line",
                "reason",
            ),
            compiles,
        ),
        Table(
            _title("Kernels", len(facts.kernels), "first"),
            ("op", "chosen", "count", "line", "why"),
            [
                (choice.op, choice.implementation, str(count), short(choice.line), choice.why)
                for choice, count in facts.kernels[:_MOST_ROWS]
            ],
        ),
        Table(
            _title("Fallbacks", len(facts.fallbacks), "slowest"),
            ("op", "count", "seconds", "first line"),
            [
                (op, str(f.count), f"{f.seconds:.3f}", short(f.line))
                for op, f in facts.fallbacks[:_MOST_ROWS]
            ],
        ),
        Table(
            _title("Ops outside of compiled graphs", len(facts.splits), "first"),
            ("op", "graphs", "line", "why"),
            [
                (split.op, str(count), short(split.line), split.why)
                for split, count in facts.splits[:_MOST_ROWS]
            ],
        ),
        Table(
            _title("Parts run by CPU kernels", len(facts.host_parts), "slowest"),
            ("count", "seconds", "line"),
            [
                (str(p.count), f"{p.seconds:.3f}", short(line))
                for line, p in facts.host_parts[:_MOST_ROWS]
            ],
        ),
        Table(
            _title("Host syncs", len(facts.syncs), "most frequent"),
            ("reason", "count", "line"),
            [(reason, str(n), short(line)) for reason, line, n in facts.syncs[:_MOST_ROWS]],
        ),
        *map(peak_table, facts.peaks),
    ]


def peak_table(peak: Peak) -> Table:
    """The most memory that a device held at once, by line."""
    return Table(
        _title(
            f"Peak memory of tpu:{peak.device}, {format_bytes(peak.nbytes)}",
            len(peak.rows),
            "largest",
        ),
        ("bytes", "count", "use", "line"),
        [
            (format_bytes(r.nbytes), str(r.count), r.use, short(r.line) or "not recorded")
            for r in peak.rows[:_MOST_ROWS]
        ],
    )


def _title(name: str, length: int, which: str) -> str:
    return name if length <= _MOST_ROWS else f"{name} ({which} {_MOST_ROWS} of {length})"


def short(line: str | None) -> str:
    """A user line without the folders: ``"train.py:31 in step"``."""
    return (line or "").rsplit("/", 1)[-1]

"""``tpu flights``: the flight records of all ranks as one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

app = typer.Typer()
_WIDTH = 180


@app.command()
def flights(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="With rank-<n>.json of each rank; else the latest in TPU_FLIGHT_DIR."),
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Collectives to show of each group.")] = 20,
) -> None:
    """Show the last collectives of all ranks and the differences between ranks.

    A process writes its file when a collective fails, or when the program calls
    `tpu_distributed.flight_recorder().dump()`. Exit code 1 where ranks part.
    """
    from tpu_distributed.flight_records import report

    # In a file or a pipe a table is not broken to a terminal's width.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)
    place = folder or _latest()
    try:
        dumps = report.read(place) if place else []
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not dumps:
        raise typer.BadParameter(f"No rank-*.json in {place or 'TPU_FLIGHT_DIR'}.")
    console.print(f"{place}", highlight=False)
    for dump in dumps:
        console.print(f"  rank {dump.rank} of {dump.size}: {dump.reason}", markup=False)
    console.print(report.table(dumps, last))
    found = report.findings(dumps)
    for finding in found or ["No rank parts from the others."]:
        console.print(finding, style="bold", markup=False)
    if found:
        raise typer.Exit(1)


def _latest() -> Path | None:
    from tpu_core.config import config

    try:
        runs = [f for f in config().flight_dir.iterdir() if any(f.glob("rank-*.json"))]
    except OSError:
        return None
    return max(runs, key=lambda f: f.stat().st_mtime, default=None)

"""What every benchmark shares: arguments, a table on the screen, JSON, machine and versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def arguments(doc: str | None, **defaults: int) -> argparse.Namespace:
    """``--json FILE`` and an integer option for each default."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="append the results to this file")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """The machine and the versions a figure belongs to."""
    from importlib.metadata import version

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "command": " ".join(["python", *sys.argv]),
    }


def export(workload: str, file: Path) -> None:
    """Write a workload's weights and data for JAX, in a process of its own: torch stays out of
    this one.
    """
    code = (
        "import sys, pathlib, workloads; workloads.export(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, workload, str(file)]
    subprocess.run(command, cwd=Path(__file__).parent, check=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def report(title: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the rows as a table and append them to ``--json``.

    Args:
        title: Title of the table.
        rows: Values by column. A row may lack columns, and have others in another order.
        options: Of the command line, by `arguments`.
    """
    table = Table(title=title)
    columns: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, value)
    for name, value in columns.items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    where = machine()
    # In a file or a pipe a table is not broken to a terminal's width.
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    console.print(", ".join(f"{k} {v}" for k, v in where.items()), style="dim", highlight=False)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps({"title": title, "machine": where, "rows": rows}) + "\n")

"""``tpu report SCRIPT``: run a script and show what was compiled for it, and why."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console


def report(
    script: Annotated[Path, typer.Argument(help="A Python script.", exists=True, dir_okay=False)],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its arguments.")] = None,  # noqa: UP045
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the report to this file, as a page for a browser."),
    ] = None,
) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, then report what it compiled."""
    from tpu_core.metrics import METRICS
    from tpu_core.report import build_report

    # As python does for a script.
    sys.argv = [str(script), *(arguments or ())]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        # What was compiled before an error is of interest, too.
        made = build_report(METRICS)
        console = Console(stderr=True)
        if html is None:
            console.print(made)
        else:
            console.print(f"The report is in {made.save_html(html)}", soft_wrap=True)

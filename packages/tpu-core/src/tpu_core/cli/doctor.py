"""``tpu doctor``: versions, platform, environment, cache and conflicts, each with its remedy."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tpu_core.cli.checks import Check, run_checks

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "broken": ("broken", "bold red")}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[bool, typer.Option(help="Do not run the canaries of known faults.")] = False,
) -> None:
    """Check the environment of the device; exit with status 1 if a check fails."""
    checks = run_checks(quick)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print(checks)
    if any(check.status == "broken" for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    width = max(len(check.name) for check in checks)
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            console.print(Text(f"\n{section}", "bold"))
        mark, style = _MARKS[check.status]
        line = Text.assemble("  ", (f"{mark:8}", style), check.name.ljust(width + 2), check.value)
        console.print(line)
    problems = [check for check in checks if check.status != "ok"]
    if not problems:
        console.print(Text("\nNo problems found.", "bold green"))
        return
    console.print(Text(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}", "bold"))
    for check in problems:
        mark, style = _MARKS[check.status]
        console.print(Text.assemble((f"  {check.name}: ", style), check.value))
        console.print(Text(f"    {check.remedy}"))

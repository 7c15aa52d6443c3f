"""``tpu cache ls|verify|prune|warm``: look after the executable cache on disk."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_core.cache import ExecutableStore
from tpu_core.cli.warm import warm
from tpu_core.config import config
from tpu_core.config.kinds import parse_size
from tpu_core.errors import format_bytes

app = typer.Typer(no_args_is_help=True, help="List, check, empty and fill the executable cache.")
app.command(
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    }
)(warm)

_Number = TypeVar("_Number", int, float)
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _store() -> ExecutableStore:
    return ExecutableStore(config().cache_dir, config().cache_size)


def _refuse(store: ExecutableStore) -> None:
    """Exit with code 1 where the folder cannot be used."""
    if reason := store.refusal():
        Console(stderr=True, soft_wrap=True).print(
            Text(f"The cache folder {store.directory} {reason}. Set TPU_CACHE_DIR to your own.")
        )
        raise typer.Exit(1)


@app.command("ls")
def list_entries() -> None:
    """List the entries, the most recently used first."""
    store = _store()
    _refuse(store)
    entries = store.ls()
    console = Console(soft_wrap=True)
    table = Table("key", "size", "last used", "manifest")
    now = time.time()
    for entry in entries:
        manifest = ", ".join(f"{k}={v}" for k, v in sorted(entry.manifest.items()))
        table.add_row(
            Text(entry.key[:16]),
            format_bytes(entry.size),
            f"{_age(now - entry.last_used)} ago",
            Text(manifest[:80]),
        )
    if entries:
        console.print(table)
    console.print(
        Text(
            f"{len(entries)} entries, {format_bytes(store.size())} of "
            f"{format_bytes(store.size_limit)} in {store.directory}"
        )
    )


@app.command()
def verify() -> None:
    """Read every entry and check it; exit code 1 where one is damaged."""
    store = _store()
    problems = store.verify()
    console = Console(soft_wrap=True)
    for problem in problems:
        console.print(Text(str(problem)))
    if problems:
        console.print("Damaged entries are dropped and compiled again when they are next needed.")
        raise typer.Exit(1)
    console.print(Text(f"{len(store.ls())} entries in {store.directory} are intact."))


@app.command()
def prune(
    size: Annotated[str | None, typer.Option(help="Come down to this size, such as 1G.")] = None,
    age: Annotated[
        str | None, typer.Option(help="Remove what was not used for this long, such as 30d or 12h.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Remove every entry.")] = False,
) -> None:
    """Remove entries, the least recently used first."""
    if size is None and age is None and not all_:
        raise typer.BadParameter("Say what to remove: --size, --age or --all.")
    store = _store()
    _refuse(store)
    count, freed = store.prune(
        size=_parsed(parse_size, size, "--size", "a size such as 500M or 1G"),
        age=_parsed(parse_age, age, "--age", "an age such as 12h, 30d or 4w"),
        all=all_,
    )
    print(f"Removed {count} entries, {format_bytes(freed)}.")


def _parsed(
    parse: Callable[[str], _Number], text: str | None, option: str, valid: str
) -> _Number | None:
    try:
        return None if text is None else parse(text)
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r} is not {valid}.") from None


def parse_age(text: str) -> float:
    """Seconds from ``"45s"``, ``"10m"``, ``"12h"``, ``"30d"`` or ``"4w"``.

    Raises:
        ValueError: The text is not a number with one of these units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if not match:
        raise ValueError(text)
    return float(match[1]) * _AGE_UNITS[match[2]]


def _age(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= _AGE_UNITS[unit]:
            return f"{seconds / _AGE_UNITS[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

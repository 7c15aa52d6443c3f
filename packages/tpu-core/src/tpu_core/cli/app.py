"""The command ``tpu`` and its plug point: other packages add subcommands by entry point.

An entry point of the group ``tpu_core.cli`` names a subcommand and points at a ``typer.Typer``; it
is imported only when the subcommand is used or listed.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from tpu_core._version import __version__
from tpu_core.cli.cache import app as cache_app
from tpu_core.cli.compare import compare
from tpu_core.cli.doctor import doctor
from tpu_core.cli.ops import ops
from tpu_core.cli.report import report
from tpu_core.errors import TpuError

ENTRY_POINT_GROUP = "tpu_core.cli"


class _PluginGroup(TyperGroup):
    """A group whose subcommands are its own and those of the entry points."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(name for name in _plugins() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        point = _plugins().get(cmd_name)
        if own is not None or point is None:
            return own
        try:
            command = typer.main.get_command(point.load())
        except Exception as error:  # a broken plug-in must not take `tpu doctor` down with it
            command = typer.main.get_command(_broken(point, error))
        command.name = cmd_name
        return command


def _plugins() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _broken(point: metadata.EntryPoint, error: Exception) -> typer.Typer:
    """A subcommand that says why the real one could not be loaded."""
    package = point.dist.name if point.dist else point.value
    text = f"The subcommand '{point.name}' of {package} cannot be loaded: {error!r}"
    app = typer.Typer()

    @app.command(
        help=text, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
    )
    def fail() -> None:
        Console(stderr=True).print(text, f"Reinstall it: pip install --force-reinstall {package}")
        raise typer.Exit(1)

    return app


app = typer.Typer(
    cls=_PluginGroup,
    name="tpu",
    no_args_is_help=True,
    add_completion=False,
    help="Inspect the tpu device of PyTorch: environment, ops and executable cache.",
)
app.command()(doctor)
app.command()(ops)
_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # its options follow
app.command(context_settings=_SCRIPT)(report)
app.command(context_settings=_SCRIPT)(compare)
app.add_typer(cache_app, name="cache")


def _show_version(value: bool) -> None:
    if value:
        print(f"tpu-core {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; an error of ours is printed without a traceback, with exit code 1."""
    try:
        app()
    except TpuError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)

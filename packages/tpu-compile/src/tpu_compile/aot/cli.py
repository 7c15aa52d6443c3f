"""``tpu aot``: compile ahead of time for a topology; report memory and cost."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

app = typer.Typer()

_FUNCTION = "aot"
_HELP = f"A Python file or module with a function '{_FUNCTION}', or 'FILE:FUNCTION'."


@app.command()
def aot(
    script: Annotated[str, typer.Argument(metavar="SCRIPT_OR_MODULE", help=_HELP)],
    topology: Annotated[str, typer.Option(help="Generation and chips: v5e:2x2, v5p:4x4x4.")] = "",
    mesh: Annotated[
        str, typer.Option(help="Axes and sizes: data=16,model=4; their product is the devices.")
    ] = "",
    sweep: Annotated[
        str, typer.Option(help="More topologies, with commas; the first axis takes up the rest.")
    ] = "",
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", help="Write the plan to this file."),
    ] = None,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the plan to this file, as a page for a browser."),
    ] = None,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write executable and plan to this file."),
    ] = None,
) -> None:
    """Compile a model for TPUs and report memory, cost and communication, without a TPU.

    SCRIPT_OR_MODULE has a function that returns the arguments of `tpu_compile.aot` as a mapping:
    'model', 'example_args' and what else is wanted ('loss', 'optimizer', 'shardings', ...).
    Exit code 1 where a program does not fit.
    """
    from tpu_compile.aot.api import sweep as compile_all
    from tpu_compile.aot.page import render
    from tpu_compile.aot.tables import sweep_table

    arguments = dict(_arguments(script))
    own = arguments.pop("topology", "v5e:2x2"), arguments.pop("mesh", None)
    first = topology or own[0]
    axes = _mesh(mesh) if mesh else own[1]
    names = [first, *(name for name in sweep.split(",") if name and name != first)]
    targets = [(name, axes if name == first else _scaled(axes, name)) for name in names]
    plans = compile_all(
        arguments.pop("model"),
        arguments.pop("example_args"),
        targets=targets,
        progress=True,
        **arguments,
    )
    console = Console(soft_wrap=False)
    if len(plans) > 1:
        console.print(sweep_table(plans))
    else:
        console.print(plans[0])
    if json_file is not None:
        made = [plan.to_dict() for plan in plans]
        json_file.write_text(json.dumps(made if len(made) > 1 else made[0], indent=2) + "\n")
    if html is not None:
        html.write_text(render(plans))
    if save is not None and plans[0].fits:
        plans[0].save(save)
    if not all(plan.fits for plan in plans):
        raise typer.Exit(1)


def _arguments(script: str) -> Mapping[str, Any]:
    """Return value of the script's function."""
    place, _, name = script.partition(":")
    name = name or _FUNCTION
    if Path(place).is_file():
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = runpy.run_path(place, run_name="__tpu_aot__").get(name)
    else:
        sys.path.insert(0, "")
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            raise typer.BadParameter(f"'{place}' is neither a file nor a module.") from error
    if not callable(found):
        raise typer.BadParameter(
            f"'{place}' has no function '{name}' that returns the arguments of tpu_compile.aot."
        )
    made = found()
    if not isinstance(made, Mapping) or not {"model", "example_args"} <= set(made):
        raise typer.BadParameter(
            f"'{name}' in '{place}' returned no mapping with 'model' and 'example_args'."
        )
    return made


def _mesh(text: str) -> dict[str, int]:
    """``data=16,model=4`` as a mapping."""
    try:
        pairs = (part.split("=") for part in text.split(","))
        return {name.strip(): int(size) for name, size in pairs}
    except ValueError:
        raise typer.BadParameter(f"'{text}' is not a mesh: write data=16,model=4.") from None


def _scaled(mesh: Mapping[str, int] | None, topology: str) -> dict[str, int] | None:
    """The mesh for another topology: its first axis takes up the difference."""
    from tpu_compile.aot.chips import parse_topology

    if not mesh:
        return None
    first, *others = mesh
    rest = 1
    for name in others:
        rest *= mesh[name]
    return {**mesh, first: max(1, parse_topology(topology).devices // rest)}

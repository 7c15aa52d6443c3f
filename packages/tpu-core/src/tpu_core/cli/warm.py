"""``tpu cache warm``: compile ahead of time what a script, or most programs, will need."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tpu_core import config
from tpu_core.errors import format_bytes

if TYPE_CHECKING:
    import torch

    from tpu_core.compiler.cross_compile import CrossCompiler
    from tpu_core.metrics import CompileEvent

# Uploads end by themselves where the store fails, so this is for slow ones.
_UPLOAD_SECONDS = 3600.0


def warm(
    script: Annotated[
        str | None, typer.Argument(help="Program to run, as `python SCRIPT` would.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many steps of an optimizer.")
    ] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Compile common ops one by one, as strict mode does.")
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(help="With --ops: a shape, 32x128; may be repeated.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="With --ops: a dtype such as bfloat16; may be repeated."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="Compile for this slice of TPUs as well, v5e:1x1; needs none of them."),
    ] = None,
) -> None:
    """Fill the cache ahead of time, by running a script or with common ops.

    Options stand before SCRIPT; what follows it is the script's own. The exit code is the script's.
    """
    if ops == (script is not None):
        raise typer.BadParameter("Name a script, or give --ops.")
    if ops and (steps or module):
        raise typer.BadParameter("--steps and --module belong to a script, not to --ops.")
    if (shape or dtype) and not ops:
        raise typer.BadParameter("--shape and --dtype belong to --ops.")
    shapes = tuple(_shape(text) for text in shape or ())
    dtypes = tuple(_dtype(name) for name in dtype or ())
    # Each program as a whole, and before the end.
    os.environ["TPU_COMPILE"] = "blocking"
    # The CPU platform runs kernels where nothing is set, and makes few programs.
    os.environ.setdefault("TPU_TIERS", "compiled")
    config.reload()
    with ExitStack() as stack:
        events = stack.enter_context(_recording())
        cross = stack.enter_context(_cross_compiling(topology)) if topology else None
        if script is None:
            _run_ops(shapes, dtypes)
            code = 0
        else:
            code = _run_script(script, arguments or [], module, steps)
        code = _summary(events, code)
    raise typer.Exit(code if cross is None else _cross_summary(cross, code))


@contextmanager
def _cross_compiling(topology: str) -> Iterator[CrossCompiler]:
    """Compile what is made ready in the block for a topology too."""
    from tpu_core.cache import TieredStore, open_store
    from tpu_core.compiler.cross_compile import CrossCompiler, compiling, topology_compiler

    store = open_store(config.config())
    if store is None:
        raise typer.BadParameter("--topology needs the cache, and TPU_CACHE=off.")
    cross = CrossCompiler(topology, topology_compiler(topology), store.put)
    with compiling(cross):
        yield cross
    cross.wait()
    if isinstance(store, TieredStore):
        store.shared.flush(_UPLOAD_SECONDS)


def _cross_summary(cross: CrossCompiler, code: int) -> int:
    """Print what was compiled for a topology; the exit code."""
    console = Console(stderr=True, soft_wrap=True)
    count, size = len(cross.compiled), format_bytes(sum(cross.compiled.values()))
    console.print(
        f"{cross.topology}: {count} programs compiled, {size}; {len(cross.failed)} failed."
    )
    for error in cross.failed:
        console.print(f"{type(error).__name__}: {error}", markup=False)
    return code or int(bool(cross.failed))


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        sizes = (0,)
    if any(n < 1 for n in sizes):
        raise typer.BadParameter(f"--shape {text!r} is not a shape such as 128 or 32x128.")
    return sizes


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or found.is_complex:
        raise typer.BadParameter(f"--dtype {name!r} is not a dtype such as float32 or int64.")
    return found


@contextmanager
def _recording() -> Iterator[list[CompileEvent]]:
    """Every program made ready in the block, also where the script resets the counters."""
    from tpu_core.metrics import METRICS

    events: list[CompileEvent] = []
    compiled = METRICS.compiled

    def record(event: CompileEvent) -> None:
        events.append(event)
        compiled(event)

    METRICS.compiled = record  # type: ignore[method-assign]
    try:
        yield events
    finally:
        METRICS.compiled = compiled  # type: ignore[method-assign]


def _run_ops(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> None:
    import torch

    from tpu_core import modes
    from tpu_core.cli.common_ops import DTYPES, SHAPES, common_calls

    fill = modes.default().fill
    if fill is not None and not shapes:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("Recording ops")

            def show(text: str, done: int, total: int) -> None:
                progress.update(task, description=f"{text:<60.60}", completed=done, total=total)

            fill(dtypes, show)
        return
    calls = list(common_calls(shapes or SHAPES, dtypes or DTYPES))
    with (
        Progress(console=Console(stderr=True)) as progress,
        modes.using("strict"),
        torch.no_grad(),
    ):
        task = progress.add_task("Compiling ops", total=len(calls))
        for call in calls:
            progress.update(task, description=f"{call!s:<40}")
            call.run()
            progress.advance(task)


class _Enough(BaseException):
    """Ends the script; no `except Exception` of its own holds it up."""


def _run_script(script: str, arguments: list[str], module: bool, steps: int | None) -> int:
    """Run a program as ``python`` would; its exit code."""
    before = sys.argv, sys.path[0]
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    hook = _stop_after(steps) if steps else None
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except _Enough:
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        # Without the frames of this file and of runpy.
        entry = error.__traceback__
        while entry and entry.tb_frame.f_code.co_filename in (__file__, _RUNPY):
            entry = entry.tb_next
        traceback.print_exception(error.with_traceback(entry or error.__traceback__))
        return 1
    finally:
        if hook:
            hook.remove()
        sys.argv, sys.path[0] = before
    return 0


_RUNPY = "<frozen runpy>" if "frozen" in runpy.run_path.__code__.co_filename else runpy.__file__


def _stop_after(steps: int) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done >= steps:
            raise _Enough

    return register_optimizer_step_post_hook(count)


def _summary(events: list[CompileEvent], code: int) -> int:
    """Wait for what is under way and print the table; the exit code."""
    from tpu_core import runtime

    console = Console(stderr=True, soft_wrap=True)
    if not runtime.is_initialized():
        console.print("The device was not used: nothing to keep.")
        return code
    _finish()
    store = runtime.runtime().store
    if store is None:
        console.print("Nothing was kept: TPU_CACHE=off.")
        return code or 1
    from tpu_core.cache import TieredStore

    disk = store.disk if isinstance(store, TieredStore) else store
    table = Table("programs", "number", "ops", "seconds", "size")
    kept = 0
    for source, label in (("compiled", "compiled"), ("disk", "already there")):
        found = {event.key: event for event in events if event.source == source}
        sizes = [_size(disk.path(key)) for key in found]
        kept += sum(size > 0 for size in sizes)
        table.add_row(
            label,
            str(len(found)),
            str(sum(event.ops for event in found.values())),
            f"{sum(event.seconds for event in found.values()):.2f}",
            format_bytes(sum(sizes)),
        )
    console.print(table)
    keys = {event.key for event in events}
    console.print(f"{kept} of {len(keys)} programs are in {disk.directory}.")
    if isinstance(store, TieredStore):
        store.publish(keys)
        store.shared.flush(_UPLOAD_SECONDS)
        counts = store.shared.counts
        console.print(
            f"{store.shared.shown}: {counts.uploads} programs uploaded, {counts.given_up} not."
        )
    return code if kept == len(keys) else code or 1


def _finish() -> None:
    """Run what the script has recorded and wait for it; its errors were the script's to see."""
    import torch

    from tpu_core.errors import TpuError

    try:
        torch.get_device_module("tpu").synchronize()
    except TpuError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

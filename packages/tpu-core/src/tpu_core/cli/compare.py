"""``tpu compare SCRIPT``: run a script and compare a module's call with the CPU, layer by layer."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer
from rich.console import Console


def compare(
    script: Annotated[Path, typer.Argument(help="A Python script.", exists=True, dir_okay=False)],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its arguments.")] = None,  # noqa: UP045
    call: Annotated[
        int, typer.Option(min=1, help="Number of the call that is compared, from 1.")
    ] = 1,
    tolerance: Annotated[
        float, typer.Option(help="Roundings up to which a layer counts as right.")
    ] = 64.0,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Compare in eval() mode, without dropout.")
    ] = False,
    emulate: Annotated[
        Optional[Literal["medium", "high"]],  # noqa: UP045
        typer.Option(help="Compare the float32 products of a TPU: medium or high."),
    ] = None,
) -> None:
    """Run a script until it calls a module on the device, and compare that call with float64.

    Autocast and precision are those of the call. Exits with 1 where a layer is outside of the
    tolerance, with 2 where the module draws random numbers or the script has no such call.
    """
    import torch

    from tpu_core.comparison import compare as compare_module

    # As python does for a script.
    sys.argv = [str(script), *(arguments or ())]
    sys.path.insert(0, str(script.resolve().parent))
    console = Console(stderr=True)
    calls = 0

    def reached(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            if evaluate:
                module = copy.deepcopy(module).eval()
            made = compare_module(
                module,
                *args,
                kwargs=kwargs,
                backward=torch.is_grad_enabled(),
                tolerance=tolerance,
                emulate=emulate,
            )
            raise _Compared(made)

    try:
        with _outermost_calls(reached):
            runpy.run_path(str(script), run_name="__main__")
    except _Compared as compared:
        typer.echo(compared.result)  # wider than most terminals
        raise typer.Exit(int(compared.result.first is not None)) from None
    except ValueError as error:
        if "torch.tpu.compare" not in str(error):
            raise
        hint = " (--eval)" if "eval()" in str(error) else ""
        console.print(f"{error}{hint}", soft_wrap=True)
        raise typer.Exit(2) from None
    console.print(f"{script} called modules on the device {calls} times.", soft_wrap=True)
    raise typer.Exit(2)


class _Compared(BaseException):
    """Ends the script: the comparison is there."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


@contextmanager
def _outermost_calls(function: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Have a function called before each call of a module on the device that no other module makes.

    Global hooks of PyTorch do not see keyword arguments.
    """
    import torch
    from torch.utils import _pytree

    original = torch.nn.Module.__call__
    inside = False

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        nonlocal inside
        given = _pytree.tree_leaves((args, kwargs))
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        if inside or not any(t.device.type == "tpu" for t in tensors):
            return original(self, *args, **kwargs)
        inside = True
        try:
            function(self, args, kwargs)
            return original(self, *args, **kwargs)
        finally:
            inside = False

    # mypy has no word for a method that is replaced, here for a block.
    torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]

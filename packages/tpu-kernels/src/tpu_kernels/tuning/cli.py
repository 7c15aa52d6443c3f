"""``tpu tune``: measure kernels' blocks for a chip, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer()


@app.command()
def tune(
    chip: Annotated[str, typer.Option(help="Generations, with commas: v4, v5e, v5p, v6e, tpu7x.")],
    heads: Annotated[
        str, typer.Option(help="Head sizes, with commas; 192x128 where values have another.")
    ] = "128",
    dtype: Annotated[str, typer.Option(help="Of the operands: bfloat16 or float32.")] = "bfloat16",
    length: Annotated[int, typer.Option(min=128, help="For which the choice is shown.")] = 4096,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the table there, in place of the cache folder."),
    ] = None,
) -> None:
    """Count the cycles that attention's kernels take with blocks of each size.

    No TPU is needed: libtpu schedules the kernels for the chip, and the schedule is counted.
    Programs that are lowered from then on take the size that costs the least for their lengths;
    what the package ships for common chips and heads needs no run of this command.
    """
    from tpu_kernels.ops.attention import choice
    from tpu_kernels.tuning import table
    from tpu_kernels.tuning.chips import CHIPS
    from tpu_kernels.tuning.tuner import tune as measure

    chips = [table.chip_name(name.strip()) for name in chip.split(",")]
    for name in chips:
        if name not in CHIPS:
            raise typer.BadParameter(f"'{name}' is none of {', '.join(CHIPS)}.")
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"'{dtype}' is neither bfloat16 nor float32.")
    path = output or table.user_file()
    shown = Table("chip", "head", "kernel", "block", "cycles a head", "sizes that fit")
    for name in chips:
        for sizes in map(_sizes, heads.split(",")):
            costs = measure(name, dtype, sizes)
            entry = (choice.OP, name, choice.shape(dtype, *sizes))
            table.write(path, {entry: costs})
            for kernel, of_block in costs.items():
                best = choice.best(kernel, name, dtype, (length, length), sizes, True, of_block)
                if best is not None:
                    blocks, cycles = best
                    block = f"{blocks.block_rows}x{blocks.block_columns}"
                    row = (name, f"{sizes[0]}x{sizes[1]}", kernel, block, f"{cycles:,.0f}")
                    shown.add_row(*row, str(len(of_block)))
    console = Console()
    console.print(shown)
    console.print(f"For {length} queries and keys, causal. The table is in {path}", soft_wrap=True)


def _sizes(text: str) -> tuple[int, int]:
    try:
        size, _, value_size = text.strip().partition("x")
        return int(size), int(value_size or size)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is no head size: write 128, or 192x128.") from None

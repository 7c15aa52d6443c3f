"""The table of measured costs: what the package ships, and what the user's own `tpu tune` added.

``costs.json`` beside this file, and ``tuned/costs.json`` in the cache folder, whose entries go
first. Both are part of a program's key in the executable cache
(`tpu_core.lowering.implementations.sources`), and are read once in a process.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpu_core.errors import CacheWarning
from tpu_core.extend import KernelSelection
from tpu_kernels.tuning.bundles import Bundles

Block = tuple[int, int]
"""Numbers of rows and columns."""

Costs = Mapping[str, Mapping[Block, Bundles]]
"""For each kernel, what blocks cost."""

SHIPPED = Path(__file__).with_name("costs.json")
_FILE = "costs.json"


def user_file() -> Path:
    """The user's file, which need not exist."""
    return KernelSelection.tuned_folder() / _FILE


def find(op: str, kind: str | None, shape: str) -> Costs:
    """Measured costs of an op's blocks; empty where there are none.

    Args:
        op: As in `tpu_kernels.using`.
        kind: Generation of the chips as `Target.kind` has it, ``"TPU v5e"``.
        shape: Key of the costs, as the op writes it: ``"bfloat16/128/128"``.
    """
    return {} if kind is None else _read().get((op, chip_name(kind), shape), {})


def chip_name(kind: str) -> str:
    """The name under which a generation is in the table: ``"v5e"``, ``"tpu7x"``."""
    name = kind.lower().replace(" ", "").removeprefix("tpu")
    return "tpu7x" if name in ("7x", "v7x") else name


def write(path: Path, entries: Mapping[tuple[str, str, str], Costs]) -> None:
    """Add entries to a file; those of the same op, chip and shape are replaced.

    Args:
        path: The file; it is replaced as a whole, so that readers see the old or the new one.
        entries: Costs by op, chip and shape.
    """
    merged: dict[str, Any] = _load(path) if path.exists() else {}
    for (op, chip, shape), costs in entries.items():
        rows = {
            kernel: {
                f"{r}x{c}": [b.block, b.step, b.once] for (r, c), b in sorted(of_block.items())
            }
            for kernel, of_block in sorted(costs.items())
        }
        merged.setdefault(op, {}).setdefault(chip, {})[shape] = rows
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump(merged, file, indent=1, sort_keys=True)
        file.write("\n")
    Path(name).replace(path)
    _read.cache_clear()


@functools.cache
def _read() -> dict[tuple[str, str, str], Costs]:
    read = dict(_entries(_load(SHIPPED)))
    mine = user_file()
    try:
        read |= _entries(_load(mine)) if mine.exists() else ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # Not of the form that `write` gives it: the shipped table serves.
        warnings.warn(
            CacheWarning(
                f"{mine} is no table of `tpu tune` ({error}); it is not used.",
                remedy="Remove it, or run `tpu tune` again.",
            ),
            stacklevel=2,
        )
    return read


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def _entries(loaded: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Costs]]:
    for op, chips in loaded.items():
        for chip, shapes in chips.items():
            for shape, costs in shapes.items():
                yield (
                    (op, chip, shape),
                    {
                        kernel: {_block(name): Bundles(*map(int, b)) for name, b in rows.items()}
                        for kernel, rows in costs.items()
                    },
                )


def _block(name: str) -> Block:
    rows, columns = map(int, name.split("x"))
    if rows <= 0 or columns <= 0 or rows % 128 or columns % 128:
        raise ValueError(f"a block of {name}")
    return rows, columns

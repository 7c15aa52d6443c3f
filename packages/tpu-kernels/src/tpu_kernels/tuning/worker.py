"""The process that compiles a kernel with blocks of each size, for a chip that need not be there.

It reads a request from standard input and writes a line of JSON for each size. Some programs abort
libtpu: `tpu_kernels.tuning.tuner` then starts another worker for the sizes that are left.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from tpu_core.extend import LibtpuTopology, Target
from tpu_kernels.ops.attention import tuning
from tpu_kernels.tuning.bundles import Bundles, count

# Of the many stages of a schedule, the one that runs.
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={}"
_STAGE = "final_bundles"


def main() -> None:
    """Answer the request on standard input, with `measure`'s arguments."""
    request = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory(prefix="tpu-tune-") as folder:
        # libtpu reads them when it is loaded, which is at the first program.
        os.environ.update(LibtpuTopology.ENVIRONMENT)
        own = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{own} {_FLAGS.format(folder, f'^{_STAGE}$')}"
        for line in measure(folder=Path(folder), **request):
            print(json.dumps(line), flush=True)


def measure(
    folder: Path,
    topology: str,
    dtype: str,
    sizes: tuple[int, int],
    blocks: Sequence[tuple[int, int]],
) -> Iterator[dict[str, Any]]:
    """Compile for each size of blocks.

    Args:
        folder: In which libtpu writes schedules.
        topology: For what, as libtpu names it.
        dtype: Of the operands.
        sizes: Of a head of the query and of the value.
        blocks: Rows and columns.

    Yields:
        ``block``, and ``costs``: the fields of `Bundles` by kernel; without ``costs`` where libtpu
        refuses the size, with its message in ``error``.
    """
    device = LibtpuTopology(topology).device()
    sharding = jax.sharding.SingleDeviceSharding(device)
    for block in blocks:
        for old in folder.iterdir():
            old.unlink()
        function, avals = tuning.program(dtype, *sizes, (block[0], block[1]))
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
        try:
            _compile(function, placed)
        except jax.errors.JaxRuntimeError as error:
            yield {"block": block, "error": str(error).partition("\n")[0]}
            continue
        costs = {name: asdict(_bundles(folder, name)) for name in tuning.KERNELS}
        yield {"block": block, "costs": costs}


def _compile(function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
    with Target("tpu").applied(), jax.enable_x64(True):
        jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",)).compile()


def _bundles(folder: Path, kernel: str) -> Bundles:
    (file,) = folder.glob(f"*-{kernel}.[0-9]*[0-9]-{_STAGE}.txt")
    with file.open() as lines:
        return count(lines)


if __name__ == "__main__":
    main()

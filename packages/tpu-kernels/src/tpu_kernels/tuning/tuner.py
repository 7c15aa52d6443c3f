"""Measure blocks of all sizes for a chip, in processes that libtpu may end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tpu_core.errors import KernelCompilationError, LibtpuMissingError
from tpu_kernels.ops.attention.tuning import CANDIDATES, KERNELS
from tpu_kernels.tuning.bundles import Bundles
from tpu_kernels.tuning.chips import CHIPS
from tpu_kernels.tuning.table import Block, Costs


def tune(chip: str, dtype: str, sizes: tuple[int, int]) -> Costs:
    """Measure attention's blocks on a chip; sizes that do not fit are left out.

    Takes about two seconds a size. No TPU is needed, only libtpu.

    Args:
        chip: One of `CHIPS`.
        dtype: Of the operands.
        sizes: Of a head of the query and of the value.

    Raises:
        LibtpuMissingError: libtpu is not installed.
        KernelCompilationError: No size compiled; says why the first did not.

    Example:
        >>> tune("v5e", "bfloat16", (128, 128))["attention"][512, 512]
        Bundles(block=1145, step=100, once=579)
    """
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissingError("libtpu is not installed: it schedules kernels for TPUs.")
    costs: dict[str, dict[Block, Bundles]] = {kernel: {} for kernel in KERNELS}
    left = list(CANDIDATES)
    refusals: list[str] = []
    while left:
        for answer in _answers(chip, dtype, sizes, tuple(left)):
            block = tuple(answer["block"])
            left.remove(block)
            for kernel, parts in answer.get("costs", {}).items():
                costs[kernel][block] = Bundles(**parts)
            if "error" in answer:
                refusals.append(answer["error"])
    if not any(costs.values()):
        # An empty entry in the table would take the place of the one that is shipped.
        raise KernelCompilationError(
            f"None of the {len(CANDIDATES)} sizes of blocks compiled for {chip}.",
            values={
                "dtype": dtype,
                "head": f"{sizes[0]}x{sizes[1]}",
                "the first": refusals[0],
            },
            remedy="Tune for smaller heads, or with the libtpu that the installed jax names.",
        )
    return costs


def _answers(
    chip: str, dtype: str, sizes: tuple[int, int], blocks: tuple[Block, ...]
) -> Iterator[dict[str, Any]]:
    """Answers of one worker; where it ends early, the last is an error."""
    request = {
        "topology": CHIPS[chip].topology,
        "dtype": dtype,
        "sizes": sizes,
        "blocks": blocks,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tpu_kernels.tuning.worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    yield from answers
    if len(answers) < len(blocks):
        # The process ended over the next of them.
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        error = f"the compiler's process ended with status {done.returncode}, and said: {said}"
        yield {"block": blocks[len(answers)], "error": error}

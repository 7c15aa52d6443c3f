"""Measure blocks of all sizes for a chip, in processes that libtpu may end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tpu_core.errors import LibtpuMissingError
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

    Example:
        >>> tune("v5e", "bfloat16", (128, 128))["attention"][512, 512]
        Bundles(block=1145, step=100, once=579)
    """
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissingError("libtpu is not installed: it schedules kernels for TPUs.")
    costs: dict[str, dict[Block, Bundles]] = {kernel: {} for kernel in KERNELS}
    left = list(CANDIDATES)
    while left:
        for answer in _answers(chip, dtype, sizes, left):
            block = tuple(answer["block"])
            left.remove(block)
            for kernel, parts in answer.get("costs", {}).items():
                costs[kernel][block] = Bundles(**parts)
        # Where the process ended before all were there, it was over the next of them.
        del left[:1]
    return costs


def _answers(
    chip: str, dtype: str, sizes: tuple[int, int], blocks: list[Block]
) -> Iterator[dict[str, Any]]:
    request = {
        "topology": CHIPS[chip].topology,
        "dtype": dtype,
        "sizes": sizes,
        "blocks": blocks,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tpu_kernels.tuning.worker"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)

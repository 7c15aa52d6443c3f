"""Ops of PyTorch's OpInfo and their gradients on small tensors, against torch on the CPU.

The first sample of each op that takes float32, forward and with its gradient; CPU time of the
calling thread, the best of some loops on each device in one process. Ops that one device refuses
are left out. The table has the ops that are farthest from the CPU, and the geometric mean of all:
an op far beyond it is a composite where the CPU has a kernel, or goes no direct way to a kernel.

    taskset -c 0 python integration/benchmarks/single_ops.py --worst 20
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))
from opinfo import op_db

DEVICES = ("cpu", "tpu")


def microseconds(call: Callable[[], object], loops: int, calls: int) -> float:
    """CPU time of one call, of the best loop."""
    best = math.inf
    for _ in range(loops + 1):
        started = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, time.thread_time() - started)
    return best / calls * 1e6


def differentiated(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results that have a gradient."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor) and x.requires_grad]


def calls_of(op: Any, sample: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The op's call on a device, and that with its gradient."""

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return torch.device(device) if isinstance(x, torch.device) else x
        return x.detach().to(device).requires_grad_(x.requires_grad)

    first, args, kwargs = pytree.tree_map(moved, (sample.input, sample.args, sample.kwargs))

    leaves = differentiated((first, args, kwargs))

    def forward() -> Any:
        return op.op(first, *args, **kwargs)

    def with_gradient() -> None:
        found = differentiated(forward())
        ones = [torch.ones_like(x) for x in found]
        torch.autograd.grad(found, leaves, ones, allow_unused=True)

    return forward, with_gradient


def row_of(op: Any, loops: int, calls: int) -> dict[str, Any] | None:
    """Times of an op, or None where a device refuses it."""
    sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=True)), None)
    if sample is None:
        return None
    row: dict[str, Any] = {"op": op.name}
    for device in DEVICES:
        forward, with_gradient = calls_of(op, sample, device)
        try:
            with_gradient()
        except (RuntimeError, TypeError, ValueError):  # of a gradient alone, or of the op
            return None
        row[f"{device} forward (us)"] = microseconds(forward, loops, calls)
        row[f"{device} gradient (us)"] = microseconds(with_gradient, loops, calls)
    for part in ("forward", "gradient"):
        row[part] = row[f"tpu {part} (us)"] / row[f"cpu {part} (us)"]
    return row


def main() -> None:
    options = harness.arguments(__doc__, loops=10, calls=20, worst=20)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.tpu.init()
    ops = [op for op in op_db if op.supports_autograd and not op.variant_test_name]
    found = [row for op in ops if (row := row_of(op, options.loops, options.calls))]
    found.sort(key=lambda row: -row["gradient"])
    rows = found[: options.worst]
    mean: dict[str, Any] = {"op": f"geometric mean of {len(found)}"}
    for part in ("forward", "gradient"):
        mean[part] = math.exp(sum(math.log(row[part]) for row in found) / len(found))
    harness.report(
        "Small ops, with their gradients, against torch on the CPU", [*rows, mean], options
    )


if __name__ == "__main__":
    main()

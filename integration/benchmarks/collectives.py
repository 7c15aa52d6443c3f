"""Collectives on the device against PyTorch's gloo on CPU tensors, two processes, wall time.

Both are measured in turn in the same processes. ``issue`` is the host's CPU time in the call of an
asynchronous all_reduce that other ranks are ready for: of the first after a barrier, which leaves
the caches cold, and of those in a burst, as DistributedDataParallel issues its buckets.

    python integration/benchmarks/collectives.py --rounds 50 --json out.json
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import ranks

PROCESSES = 2
BURST = 8
# Elements of float32, and the target of the ratio to gloo.
SIZES = {"1 KB": (256, 1.1), "1 MB": (1 << 18, 1.1), "64 MB": (1 << 24, 1.3)}


def main() -> None:
    options = harness.arguments(__doc__, rounds=30)
    if "RANK" in os.environ:
        print(json.dumps(measure(options.rounds)))
        return
    rows = ranks.run(__file__, PROCESSES, "--rounds", str(options.rounds), timeout=600)[0]
    harness.report("all_reduce over 2 processes", rows, options)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows of the table; every rank measures, the first one's count."""
    import torch.distributed as dist

    dist.init_process_group()
    rows = [row(name, *size, rounds) for name, size in SIZES.items()]
    dist.barrier()
    dist.destroy_process_group()
    return rows


def row(name: str, elements: int, target: float, rounds: int) -> dict[str, Any]:
    """One size, on the device and on the CPU."""
    import torch
    import torch.distributed as dist

    ours, theirs = torch.ones(elements, device="tpu"), torch.ones(elements)
    pair = {"tpu": ours, "gloo": theirs}

    def on_device() -> None:
        dist.all_reduce(ours, dist.ReduceOp.MAX)
        torch.tpu.synchronize()

    def on_cpu() -> None:
        dist.all_reduce(theirs, dist.ReduceOp.MAX)

    fewer = max(3, rounds // (1 + (elements >> 20)))
    times = in_turn({"tpu": on_device, "gloo": on_cpu}, fewer)
    issue = {(kind, n): issuing(x, rounds, n) for kind, x in pair.items() for n in (1, BURST)}
    return {
        "size": name,
        "tpu (ms)": times["tpu"] * 1e3,
        "gloo (ms)": times["gloo"] * 1e3,
        "ratio": times["tpu"] / times["gloo"],
        "target": target,
        "issue, cold (us)": issue["tpu", 1],
        "gloo's": issue["gloo", 1],
        "in a burst (us)": issue["tpu", BURST],
        "gloo's in one": issue["gloo", BURST],
    }


def issuing(x: Any, rounds: int, burst: int) -> float:
    """Median CPU time of a call in microseconds, where so many follow a barrier."""
    import torch.distributed as dist

    tensors = [x.clone() for _ in range(burst)]
    times = []
    for _ in range(max(3, rounds // burst)):
        dist.barrier()
        works = []
        for tensor in tensors:
            started = time.thread_time()
            works.append(dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True))
            times.append(time.thread_time() - started)
        for work in works:
            work.wait()
    return statistics.median(times) * 1e6


def in_turn(functions: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median time of each, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


if __name__ == "__main__":
    main()

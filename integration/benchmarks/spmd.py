"""A training step in `tpu_distributed.spmd()` against the same step out of it, two processes.

Both are measured in turn in the same processes: the CPU time of a process and the wall time of a
step of a perceptron, by DistributedDataParallel, and with gradients that are reduced one by one.

    python integration/benchmarks/spmd.py --rounds 20 --json out.json
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
LAYERS, WIDTH, BATCH = 6, 64, 32


def main() -> None:
    options = harness.arguments(__doc__, rounds=20)
    if "RANK" in os.environ:
        print(json.dumps(measure(options.rounds)))
        return
    rows = ranks.run(__file__, PROCESSES, "--rounds", str(options.rounds), timeout=600)[0]
    harness.report("A step over 2 processes, in a region and out of it", rows, options)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows of the table; every rank measures, the first one's count."""
    import torch
    import torch.distributed as dist

    import tpu_distributed

    dist.init_process_group()
    device = torch.device("tpu", int(os.environ["RANK"]))
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    net = torch.nn.Sequential(*blocks).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH).to(device)

    def by_ddp() -> None:
        parallel(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def one_by_one() -> None:
        with parallel.no_sync():
            parallel(x).pow(2).mean().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()

    def ran() -> int:
        return int(torch.tpu.metrics()["executions"])

    ways: dict[str, Callable[[], None]] = {
        "DDP, out of spmd()": by_ddp,
        "DDP, in spmd()": tpu_distributed.spmd()(by_ddp),
        f"{2 * LAYERS} all_reduces, out of spmd()": one_by_one,
        f"{2 * LAYERS} all_reduces, in spmd()": tpu_distributed.spmd()(one_by_one),
    }
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    wall: dict[str, list[float]] = {way: [] for way in ways}
    programs: dict[str, int] = {}
    for i in range(rounds + 4):
        for way, run in ways.items():
            torch.accelerator.synchronize(device)
            dist.barrier()
            before, started, used = ran(), time.perf_counter(), time.process_time()
            run()
            torch.accelerator.synchronize(device)
            if i >= 4:
                wall[way].append(1e3 * (time.perf_counter() - started))
                cpu[way].append(1e3 * (time.process_time() - used))
            programs[way] = ran() - before
    dist.destroy_process_group()
    return [
        {
            "step": way,
            "programs": programs[way],
            "cpu ms": round(statistics.median(cpu[way]), 2),
            "wall ms": round(statistics.median(wall[way]), 2),
        }
        for way in ways
    ]


if __name__ == "__main__":
    main()

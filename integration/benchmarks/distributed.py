"""Training the benchmarks' GPT in several processes: what it costs, holds and compiles.

* A step with DistributedDataParallel in 2 processes, each on half of the machine, against the
  same step without communication in one of them, the other one idle. Both in turn, wall time.
* What parameters, gradients and optimizer state take with FSDP2: a rank of 4 against one process.
* Compiles that begin after the third of 200 steps while rank 0 alone logs and saves.

    python integration/benchmarks/distributed.py --rounds 10 --json out.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import ranks

PARTS = ("step", "memory", "compiles")
LOGGED, SAVED, WARM = 10, 50, 3  # steps between two; and until nothing may be compiled


def main() -> None:
    os.environ.setdefault("TPU_COMPILE", "blocking")
    if "RANK" in os.environ:
        part, count = sys.argv[1], int(sys.argv[2])
        print(json.dumps({"step": step, "memory": memory, "compiles": compiles}[part](count)))
        return
    options = harness.arguments(__doc__, rounds=10, steps=200)

    times = ranks.run(__file__, 2, "step", str(options.rounds))[0]
    row = {**times, "ratio": times["ddp (ms)"] / times["alone (ms)"], "target": 1.25}
    harness.report(
        "DDP step of the GPT, 2 processes against one on half the machine", [row], options
    )

    one, four = (max(ranks.run(__file__, n, "memory", "3"), key=held) for n in (1, 4))
    rows = [
        {"memory": name, "1 process": one[name], "4 processes": four[name]}
        | {"ratio": four[name] / one[name], "target": 0.3 if name == "held (MiB)" else None}
        for name in one
    ]
    harness.report("FSDP2 step of the GPT, the rank that takes most", rows, options)

    found = ranks.run(__file__, 2, "compiles", str(options.steps))
    rows = [{"rank": rank, **row, "target": 0} for rank, row in enumerate(found)]
    harness.report(f"Programs made after step {WARM} of {options.steps}", rows, options)


def held(row: dict[str, float]) -> float:
    """What a rank keeps from step to step."""
    return row["held (MiB)"]


def training(model: Any, data: dict[str, Any]) -> Callable[[], Any]:
    """A step of the GPT that returns its loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> Any:
        optimizer.zero_grad()
        logits = model(data["x"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["y"].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def step(rounds: int) -> dict[str, float]:
    """Median milliseconds of a step, by rank 0."""
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    # Before the frameworks start their threads.
    os.sched_setaffinity(0, cores[rank * half : (rank + 1) * half] or cores)
    import torch.distributed as dist
    import workloads

    dist.init_process_group()
    steps = {}
    for name in ("ddp", "alone"):
        model, data = workloads.materials("gpt")
        model.to("tpu")
        if name == "ddp":
            model = torch_ddp(model)
        steps[name] = training(model, {k: v.to("tpu") for k, v in data.items()})
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + WARM):
        for name, run in steps.items():
            dist.barrier()
            if name == "alone" and rank:
                continue  # to the next barrier, where it takes no time of the machine's
            started = time.perf_counter()
            run().item()
            times[name].append(time.perf_counter() - started)
    dist.barrier()
    dist.destroy_process_group()
    return {
        f"{name} (ms)": statistics.median(values[WARM:]) * 1e3
        for name, values in times.items()
        if values
    }


def torch_ddp(model: Any) -> Any:
    """The model, replicated."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def memory(steps: int) -> dict[str, float]:
    """MiB that parameters, gradients and optimizer state take, and the peak in a step."""
    import torch
    import torch.distributed as dist
    import workloads
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    model, data = workloads.materials("gpt")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to("tpu")
    share = slice(dist.get_rank(), None, dist.get_world_size())
    step = training(model, {k: v[share].to("tpu") for k, v in data.items()})
    for _ in range(steps):
        torch.tpu.synchronize()
        torch.tpu.reset_peak_memory_stats()
        step().item()
    torch.tpu.synchronize()
    peak = torch.tpu.max_memory_allocated()
    del data
    # Gradients are there until the next step sets them to None.
    now = torch.tpu.memory_allocated()
    dist.barrier()
    dist.destroy_process_group()
    return {"held (MiB)": now / 2**20, "peak in a step (MiB)": peak / 2**20}


def compiles(steps: int) -> dict[str, float]:
    """Compiles begun and programs loaded after the first steps."""
    import torch
    import torch.distributed as dist
    import workloads

    dist.init_process_group()
    rank = dist.get_rank()
    model, data = workloads.materials("accum")
    model.to("tpu")
    batch = {name: t[0, rank].to("tpu") for name, t in data.items()}
    step = training(torch_ddp(model), batch)

    def made() -> dict[str, float]:
        now = torch.tpu.metrics()
        return {
            "compiled": now["compiles"] + now["compiles_pending"],
            "loaded": now["cache_hits_disk"],
        }

    with tempfile.TemporaryDirectory() as folder:
        for number in range(steps):
            loss = step()
            if rank == 0 and number % LOGGED == 0:
                print(f"step {number}: loss {loss.item():.3f}")
            if rank == 0 and number % SAVED == SAVED - 1:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
            if number == WARM - 1:
                before = made()
    after = made()
    dist.barrier()
    dist.destroy_process_group()
    return {name: after[name] - before[name] for name in after}


if __name__ == "__main__":
    main()

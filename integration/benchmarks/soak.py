"""Trains for many steps, with the memory flat and nothing compiled once warm, or fails.

A 2-layer GPT (``accum`` of the benchmarks): gradients of four batches are accumulated and clipped,
the learning rate follows a schedule, every tenth loss is read back. ``nox -s soak`` runs 20,000
steps; ``nox -s soak -- --steps 2000`` fewer, ``-- --seconds 600`` as many as there is time for.
``-- --varying 1`` trains on another graph in each step instead (``graph_net`` of the programs).
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# All that is compiled is there once the first steps are done.
os.environ.setdefault("TPU_COMPILE", "blocking")

import harness
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import programs
from models.gpt import GPT, random_batch

LENGTH, BATCH, ACCUMULATED = 64, 4, 4
# What the process may grow by in the whole run once warm: fragments of the host's allocator.
HOST_GROWTH_MIB = 32.0
# Of tensors whose sizes vary: what is alive at a reading is more or less than at the first.
DEVICE_GROWTH_MIB = 1.0


@dataclass
class Reading:
    """Counters at a step; memory in MiB, the time since the last reading in ms a step."""

    step: int
    loss: float
    device: float
    host: float
    compiles: int
    programs_run: int
    step_ms: float


def resident() -> float:
    """MiB of the process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def training() -> Iterator[torch.Tensor]:
    """Endless training; yields the loss of each step, still on the device."""
    torch.manual_seed(0)
    model = GPT(length=LENGTH, layers=2, dim=64).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.6 + 0.4 * math.cos(i / 500))
    generator = torch.Generator().manual_seed(0)
    batches = itertools.cycle([random_batch(generator, BATCH, LENGTH) for _ in range(64)])
    while True:
        total = torch.zeros((), device="tpu")
        for ids, targets in itertools.islice(batches, ACCUMULATED):
            loss = model.loss(ids.to("tpu"), targets.to("tpu")) / ACCUMULATED
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield total


def varying() -> Iterator[torch.Tensor]:
    """Endless training on graphs of other sizes in each step."""
    for loss in programs.start("graph_net", "tpu"):
        yield torch.tensor(loss)


def read(step: int, loss: float, seconds: float, steps: int) -> Reading:
    gc.collect()
    torch.tpu.synchronize()
    count = torch.tpu.metrics()
    return Reading(
        step,
        loss,
        torch.tpu.memory_allocated() / 2**20,
        resident(),
        int(count["compiles"] + count["cache_hits_disk"]),
        int(count["executions"]),
        seconds / steps * 1e3,
    )


def main() -> None:
    options = harness.arguments(
        __doc__, steps=20_000, every=1_000, warm_up=100, seconds=0, varying=0
    )
    readings: list[Reading] = []
    started = last_time = time.perf_counter()
    last_step, value = 0, math.nan
    losses = varying() if options.varying else training()
    for step, loss in enumerate(itertools.islice(losses, options.steps), 1):
        if step % 10 == 0:
            value = loss.item()
        over = options.seconds and time.perf_counter() - started > options.seconds
        if step == options.warm_up or step % options.every == 0 or over:
            now = time.perf_counter()
            readings.append(read(step, value, now - last_time, step - last_step))
            print(readings[-1], flush=True)
            last_step, last_time = step, time.perf_counter()
        if over:
            break
    harness.report("Soak", [asdict(r) for r in readings], options)
    if problems := list(complaints(readings, DEVICE_GROWTH_MIB if options.varying else 0.0)):
        sys.exit("\n".join(problems))


def complaints(readings: list[Reading], growth: float) -> Iterator[str]:
    """What was not as it should be between the end of the warm-up and the last reading.

    Args:
        readings: The first at the end of the warm-up.
        growth: MiB that device memory may grow by.
    """
    first, last = readings[0], readings[-1]
    steps = max(last.step - first.step, 1)
    if not math.isfinite(last.loss):
        yield f"The loss is {last.loss} after {last.step} steps."
    if last.compiles > first.compiles:
        yield f"{last.compiles - first.compiles} programs were made after step {first.step}."
    if last.device > first.device + growth:
        yield (
            f"Device memory grew from {first.device:.3f} to {last.device:.3f} MiB in {steps} steps."
        )
    # The first readings see the allocator's pools fill.
    start = readings[min(2, len(readings) - 1)]
    if last.host - start.host > HOST_GROWTH_MIB:
        yield (
            f"The process grew from {start.host:.0f} MiB at step {start.step} "
            f"to {last.host:.0f} MiB at step {last.step}."
        )


if __name__ == "__main__":
    main()

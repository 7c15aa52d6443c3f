"""How much of the host's work is hidden behind the device's: recording, and copies both ways.

Each row does the same work twice in turn. Waiting: the host waits for the device after each step.
Overlapping: it waits at the end. What the host has to do in a step is the time until the step's
calls return, the device being idle. Wall time; the device gets one core, so that the host has
another.

    python integration/benchmarks/overlap.py --rounds 15 --json out.json
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
os.environ["TPU_COMPILE"] = "blocking"

import harness
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from models.gpt import GPT, random_batch

STEPS = 8  # between two waits
BATCH = 1 << 23  # elements that are moved, 32 MiB
ROWS = 1536  # of the product that hides a move

Step = Callable[[], object]


def training() -> Step:
    """A step of a small GPT: several hundred ops to record."""
    torch.manual_seed(0)
    model = GPT(length=64, layers=4, dim=64).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = (t.to("tpu") for t in random_batch(torch.Generator().manual_seed(0), 8, 64))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()

    return step


def product() -> Step:
    """A product that keeps the device busy for some time."""
    a = torch.randn(ROWS, ROWS, device="tpu")

    def step() -> torch.Tensor:
        result = a @ a
        torch.tpu.Event().record()  # off to the device
        return result

    return step


def moving_in(compute: Step) -> Step:
    """A batch moved to the device after a step was sent off."""
    batch = torch.randn(BATCH).pin_memory()

    def step() -> None:
        compute()
        batch.to("tpu", non_blocking=True)

    return step


def moving_out(compute: Step) -> Step:
    """A result copied to pinned memory, on a side stream, while the next step runs."""
    result = torch.randn(BATCH, device="tpu")
    host = torch.empty(BATCH, pin_memory=True)
    side = torch.tpu.Stream()

    def step() -> None:
        side.wait_stream(torch.tpu.current_stream())
        with torch.tpu.stream(side):
            host.copy_(result, non_blocking=True)
        compute()

    return step


def seconds(step: Step, wait_each: bool) -> tuple[float, float]:
    """Wall time of a step, and of its calls alone."""
    calls = 0.0
    started = time.perf_counter()
    for _ in range(STEPS):
        before = time.perf_counter()
        step()
        calls += time.perf_counter() - before
        if wait_each:
            torch.tpu.synchronize()
    torch.tpu.synchronize()
    return (time.perf_counter() - started) / STEPS, calls / STEPS


def row(name: str, step: Step, work: Callable[[float], float], rounds: int) -> dict[str, object]:
    """One line of the table; ``work`` gives what of a step could be hidden, from its calls."""
    for _ in range(2):
        seconds(step, wait_each=True)
    waiting, overlapping = [], []
    for _ in range(rounds):
        waiting.append(seconds(step, wait_each=True))
        overlapping.append(seconds(step, wait_each=False))
    serial = statistics.median(total for total, _ in waiting)
    ahead = statistics.median(total for total, _ in overlapping)
    hideable = work(statistics.median(calls for _, calls in waiting))
    return {
        "what": name,
        "waiting (ms)": serial * 1e3,
        "overlapping (ms)": ahead * 1e3,
        "to hide (ms)": hideable * 1e3,
        "hidden": (serial - ahead) / hideable,
    }


def alone(step: Step, rounds: int) -> float:
    """Seconds of a step that is waited for."""
    return statistics.median(seconds(step, wait_each=True)[0] for _ in range(rounds))


def main() -> None:
    options = harness.arguments(__doc__, rounds=11)
    compute = product()
    out = moving_out(lambda: None)
    for _ in range(2):
        alone(compute, 1)
        alone(out, 1)
    copying = alone(out, options.rounds)
    rows = [
        row("recording a training step", training(), lambda calls: calls, options.rounds),
        row("moving a batch in", moving_in(compute), lambda calls: calls, options.rounds),
        row("copying to pinned memory", moving_out(compute), lambda _: copying, options.rounds),
    ]
    harness.report("Host work hidden behind the device", rows, options)


if __name__ == "__main__":
    main()

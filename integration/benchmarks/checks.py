"""What checks of values cost a step (``TPU_CHECKS``), as ratios of CPU time within one process.

The programs of each level take turns, a step each, and every step ends with a read of the loss.
Ratios of medians; pin one core for figures that repeat:

    taskset -c 0 python integration/benchmarks/checks.py --steps 15
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TPU_TIERS", "compiled")  # kernels of the other tier check in any case

import harness
import torch
import torch.nn.functional as F
import workloads

from tpu_core.config import reload

LEVELS = ("off", "default", "all")
_WORDS, _WIDTH, _CLASSES = 50_000, 64, 100


def embeddings() -> Callable[[int], torch.Tensor]:
    """A step of a bag of words: nearly all of it reads and writes rows of a table."""
    g = torch.Generator().manual_seed(0)
    table = torch.nn.Embedding(_WORDS, _WIDTH, device="tpu")
    layer = torch.nn.Linear(_WIDTH, _CLASSES, device="tpu")
    optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
    tokens = torch.randint(_WORDS, (256, 128), generator=g).to("tpu")
    labels = torch.randint(_CLASSES, (256,), generator=g).to("tpu")

    def step(_: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(table(tokens).mean(1)), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def gathers() -> Callable[[int], torch.Tensor]:
    """No more than an index for each element that is read: the most that a check can cost."""
    x = torch.randn(512, 1024, device="tpu")
    g = torch.Generator().manual_seed(0)
    index = torch.randint(1024, (512, 1024), generator=g).to("tpu")

    def step(_: int) -> torch.Tensor:
        return x.gather(1, index).sum()

    return step


def seconds(step: Callable[[int], torch.Tensor], steps: int) -> dict[str, float]:
    """Median CPU time of a step at each level."""
    taken: dict[str, list[float]] = {level: [] for level in LEVELS}
    for n in range(-3, steps):
        for level in LEVELS:
            os.environ["TPU_CHECKS"] = level
            reload()
            started = time.process_time()
            loss = step(max(n, 0))
            loss.item()
            if n >= 0:
                taken[level].append(time.process_time() - started)
    return {level: statistics.median(times) for level, times in taken.items()}


def main() -> None:
    options = harness.arguments(__doc__, steps=15)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], Callable[[int], torch.Tensor]]] = {
        "gpt": lambda: workloads.build("gpt", "tpu").step,
        "resnet18": lambda: workloads.build("resnet18", "tpu").step,
        "embeddings": embeddings,
        "gather": gathers,
    }
    for name, build in steps.items():
        found = seconds(build(), options.steps)
        row: dict[str, Any] = {"step": name, "off ms": round(1e3 * found["off"], 2)}
        for level in LEVELS[1:]:
            row[f"{level} / off"] = round(found[level] / found["off"], 4)
        rows.append(row)
    harness.report("Checks of values", rows, options)


if __name__ == "__main__":
    main()

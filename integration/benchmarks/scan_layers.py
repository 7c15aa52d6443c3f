"""What a deep stack of equal layers costs to compile: called one by one, and by ``scan_layers``.

The first forward pass without gradients, and the first training step (forward and backward), of
transformer layers, each measured in a process of its own with an empty cache, once it has compiled
a small stack of another width. CPU time of the process, so that other load on the machine does not
count; a later step tells what of it is running.

    taskset -c 0 python integration/benchmarks/scan_layers.py --json out.json
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import harness

WIDTH = 128
# Called one by one, 48 layers take minutes.
DEPTHS = {"one by one": (4, 12), "scan_layers": (4, 48), "scan_layers remat": (4, 48)}


def seconds_of(way: str, depth: int, width: int) -> list[float]:
    """CPU seconds of the first forward pass, of the first training step, and of a later one."""
    import torch
    from torch import nn

    import tpu_compile

    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        for _ in range(depth)
    ).to("tpu")
    x = torch.randn(2, 32, width).to("tpu")

    def forward() -> torch.Tensor:
        if way != "one by one":
            return tpu_compile.scan_layers(layers, x, remat="remat" in way).square().mean()
        hidden = x
        for layer in layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def timed(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        torch.tpu.synchronize()
        passed = time.process_time() - started
        layers.zero_grad()
        return passed

    torch.tpu.synchronize()
    with torch.no_grad():
        found = [timed(forward)]
    steps = [timed(lambda: forward().backward()) for _ in range(3)]
    return [*found, steps[0], steps[-1]]


def measured(way: str, depth: int) -> list[float]:
    """`seconds_of` in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TPU_CACHE_DIR": cache, "TPU_COMPILE": "blocking"}
        command = [sys.executable, __file__, "--child", way, str(depth)]
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [float(word) for word in out.stdout.split()[-3:]]


def child(way: str, depth: int) -> None:
    """Print the figures for the parent."""
    seconds_of(way, 2, 32)
    print(*seconds_of(way, depth, WIDTH))


def main() -> None:
    options = harness.arguments(__doc__, rounds=1)
    rows = []
    for way, depths in DEPTHS.items():
        # In turn, so that all see the same machine.
        rounds = [[measured(way, depth) for depth in depths] for _ in range(options.rounds)]
        found = [[statistics.median(column) for column in zip(*runs)] for runs in zip(*rounds)]
        for depth, (forward, step, later) in zip(depths, found):
            rows.append(
                {
                    "layers": f"{depth}, {way}",
                    "first forward (CPU s)": forward,
                    "first step (CPU s)": step,
                    f"against {depths[0]}": step / found[0][1],
                    "later step (CPU ms)": later * 1e3,
                }
            )
    harness.report("Compiling a stack of layers", rows, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main()

"""What a deep stack of equal layers costs to compile: called one by one, and by ``scan_layers``.

The first training step (forward and backward) of transformer layers, each measured in a process of
its own with an empty cache, once it has compiled a small stack of another width. CPU time of the
process, so that other load on the machine does not count.

    taskset -c 0 python integration/benchmarks/scan_layers.py --json out.json
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import harness

SHALLOW, DEEP = 4, 48
WAYS = ("one by one", "scan_layers", "scan_layers remat")


def first_step(way: str, depth: int, width: int) -> tuple[float, float]:
    """CPU seconds of the first step, and of a later one."""
    import torch
    from torch import nn

    import tpu_compile

    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        for _ in range(depth)
    ).to("tpu")
    x = torch.randn(2, 32, width).to("tpu")

    def forward(x: torch.Tensor) -> torch.Tensor:
        if way == "one by one":
            for layer in layers:
                x = layer(x)
            return x.square().mean()
        return tpu_compile.scan_layers(layers, x, remat="remat" in way).square().mean()

    seconds = []
    for _ in range(3):
        started = time.process_time()
        forward(x).backward()
        torch.tpu.synchronize()
        seconds.append(time.process_time() - started)
        layers.zero_grad()
    return seconds[0], seconds[-1]


def measured(way: str, depth: int) -> tuple[float, float]:
    """`first_step` in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TPU_CACHE_DIR": cache, "TPU_COMPILE": "blocking"}
        command = [sys.executable, __file__, "--child", way, str(depth)]
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    first, later = out.stdout.split()[-2:]
    return float(first), float(later)


def child(way: str, depth: int) -> None:
    """Print both figures for the parent."""
    first_step(way, 2, 32)
    print(*first_step(way, depth, 128))


def main() -> None:
    options = harness.arguments(__doc__, rounds=3)
    rows = []
    for way in WAYS:
        # In turn, so that both see the same machine.
        pairs = [(measured(way, SHALLOW), measured(way, DEEP)) for _ in range(options.rounds)]
        shallow, deep = (statistics.median(p[i][0] for p in pairs) for i in (0, 1))
        rows.append(
            {
                "layers": way,
                f"first step, {SHALLOW} (CPU s)": shallow,
                f"first step, {DEEP} (CPU s)": deep,
                "ratio": deep / shallow,
                f"later step, {DEEP} (CPU ms)": statistics.median(p[1][1] for p in pairs) * 1e3,
            }
        )
    harness.report("Compiling a stack of layers", rows, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main()

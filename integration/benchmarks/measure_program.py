"""Programs of ``integration/programs``, measured in this process: a line of JSON for each.

Started by ``programs.py``. The device's start is timed on its own, so that the first step is the
program's. Steps are timed in units that end with a read of the last one's number, as a program may
leave its numbers on the device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # programs

import torch
from measure import cpu_time, resident_mb

import programs

FIRST = 20
UNIT = 10  # steps: what a program does only now and then, it does in each unit
COUNTED = ("compiles", "executions", "host_ops", "promotions", "demotions", "fallbacks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+", choices=programs.NAMES, metavar="program")
    parser.add_argument("--device", choices=("cpu", "tpu"), required=True)
    parser.add_argument("--compiled", action="store_true", help="modules by torch.compile")
    parser.add_argument("--units", type=int, required=True, help="most units of steady steps")
    parser.add_argument("--seconds", type=float, required=True, help="after which three suffice")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.programs:
        importlib.import_module(f"programs.{name}")  # and what it imports
    torch.optim.SGD([torch.zeros(1)])  # imports much of torch at first use
    if options.compiled:
        compile_modules()
    for name in options.programs:
        try:
            figures = measure(name, options.device, options.units, options.seconds)
        except Exception as error:
            traceback.print_exc()
            figures = {"failed": f"{type(error).__name__}: {error}"[:60]}
        print(json.dumps({"program": name, **figures}), flush=True)


def compile_modules() -> None:
    """Make ``model.to(device)`` compile the model in place, as the program is not to be changed."""
    move = torch.nn.Module.to

    def move_and_compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        module.compile()
        return move(module, *args, **kwargs)

    torch.nn.Module.to = move_and_compile


def measure(name: str, device: str, units: int, seconds: float) -> dict[str, Any]:
    begun = time.perf_counter()
    torch.ones(1, device=device).item()
    start = time.perf_counter() - begun
    before = counts(device)
    wall, cpu = time.perf_counter(), cpu_time()
    program = programs.start(name, device)
    values = [next(program)]
    float(values[0])
    first = time.perf_counter() - wall
    values += [next(program) for _ in range(FIRST - 1)]
    float(values[-1])
    figures = {
        "start_s": start,
        "first_s": first,
        "first_steps_s": time.perf_counter() - wall,
        "first_steps_cpu_s": cpu_time() - cpu,
        "values": [float(v) for v in values],
        "first": {k: n - before[k] for k, n in counts(device).items()},
    }
    walls, cpus = [], []
    seen = counts(device)
    last_compile = FIRST if figures["first"].get("compiles") else 0
    begun = time.perf_counter()
    while len(walls) < 3 or (len(walls) < units and time.perf_counter() - begun < seconds):
        wall, cpu = time.perf_counter(), cpu_time()
        values = [next(program) for _ in range(UNIT)]
        float(values[-1])
        walls.append((time.perf_counter() - wall) / UNIT)
        cpus.append((cpu_time() - cpu) / UNIT)
        so_far = counts(device)
        if so_far.get("compiles") != seen.get("compiles"):
            last_compile = FIRST + UNIT * len(walls)
        seen = so_far
    figures |= {"wall_ms": statistics.median(walls) * 1e3, "cpu_ms": statistics.median(cpus) * 1e3}
    figures |= {"steps": FIRST + UNIT * len(walls), "resident_mb": resident_mb()}
    figures["last_compile"] = last_compile
    return figures | {"counted": {k: n - before[k] for k, n in counts(device).items()}}


def counts(device: str) -> dict[str, float]:
    if device == "cpu":
        return {}
    metrics = torch.tpu.metrics()
    return {key: metrics[key] for key in COUNTED}


if __name__ == "__main__":
    main()

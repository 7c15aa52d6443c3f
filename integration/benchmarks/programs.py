"""Programs of the kind that people write, unmodified, against torch on the CPU.

Every runner of a program is a process of its own with an empty cache and one thread of PyTorch's;
it runs the first 20 steps, and then units of ten, whose median is the steady step. Times leave out
imports and the device's start, which has a column. A ratio above 1 is slower than torch on the CPU.
On a busy machine, ``--together`` runs all programs of a runner in one process, for which the later
ones start with what those before have compiled; ratios of CPU time hold there, of wall time do not.
The last compile is before the step of that column, which is a unit's last.

    python integration/benchmarks/programs.py --only pinn,ppo --runners torch,tpu,compiled
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # programs

import harness

import programs

HERE = Path(__file__).parent
Figures = dict[str, Any]
# Device, and environment beside the cache folder; nothing else of ours is set.
RUNNERS: dict[str, tuple[str, dict[str, str]]] = {
    "torch": ("cpu", {}),
    # Each module that the program moves to the device, by `torch.compile`.
    "inductor": ("cpu", {}),
    # What runs where nothing is set: CPU kernels, and programs where they are faster.
    "tpu": ("tpu", {}),
    "compiled": ("tpu", {"TPU_TIERS": "compiled"}),
    "strict": ("tpu", {"TPU_TIERS": "compiled", "TPU_EAGER_MODE": "strict"}),
}
RATIOS = {
    "first 20 steps": "first_steps_s",
    "their CPU": "first_steps_cpu_s",
    "step, wall": "wall_ms",
    "step, CPU": "cpu_ms",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, runners = ",".join(programs.NAMES), ",".join(RUNNERS)
    parser.add_argument("--only", default=names, help=f"programs, of {names}")
    parser.add_argument("--runners", default="torch,tpu", help=f"of {runners}")
    parser.add_argument("--units", type=int, default=8, help="most units of steady steps")
    parser.add_argument("--seconds", type=float, default=10, help="after which three suffice")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a program")
    parser.add_argument("--together", action="store_true", help="a process for all programs")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    chosen = parser.parse_args()
    for option, known in (("only", programs.NAMES), ("runners", RUNNERS)):
        values = getattr(chosen, option).split(",")
        if unknown := [v for v in values if v not in known]:
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(known)}")
        setattr(chosen, option, values)
    return chosen


def main() -> None:
    chosen = options()
    groups = [chosen.only] if chosen.together else [[name] for name in chosen.only]
    runs: dict[str, dict[str, Figures]] = {name: {} for name in chosen.only}
    for group in groups:
        for runner in chosen.runners:
            for program, figures in processed(group, runner, chosen):
                runs[program][runner] = figures
                own = row(program, runner, runs[program].get("torch"), figures)
                print(own, file=sys.stderr, flush=True)
    rows = [row(p, r, own.get("torch"), f) for p, own in runs.items() for r, f in own.items()]
    harness.report("Programs", rows, chosen)
    if ratios := [*ratios_of(runs)]:
        harness.report("Ratios to torch on the CPU", ratios, chosen)


def processed(
    group: list[str], runner: str, chosen: argparse.Namespace
) -> Iterator[tuple[str, Figures]]:
    """Programs with their figures, or with what became of them as ``failed``, as they end."""
    device, own = RUNNERS[runner]
    command = [sys.executable, str(HERE / "measure_program.py"), *group, "--device", device]
    command += ["--units", str(chosen.units), "--seconds", str(chosen.seconds)]
    command += ["--compiled"] * (runner == "inductor")
    left = dict.fromkeys(group)
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TPU_")},
            **own,
            "TPU_CACHE_DIR": cache,
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TPU_PLATFORM": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(device == "tpu")),
        }
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        limit = threading.Timer(chosen.timeout * len(group), process.kill)
        limit.start()
        with process:
            assert process.stdout
            for line in process.stdout:
                figures: Figures = json.loads(line)
                del left[figures["program"]]
                yield figures["program"], figures
        limit.cancel()
    for program in left:
        yield program, {"failed": f"ended with {process.returncode}"}


def row(program: str, runner: str, reference: Figures | None, f: Figures) -> dict[str, Any]:
    """A line of the table."""
    values = (reference or {}).get("values", []), f.get("values", [])
    differences = [abs(a - b) / max(abs(a), 1e-6) for a, b in zip(*values)]
    counted = f.get("counted", {})
    return {
        "program": program,
        "runner": runner,
        "start (s)": f.get("start_s"),
        "first step (s)": f.get("first_s"),
        "first 20 (s)": f.get("first_steps_s"),
        "their CPU (s)": f.get("first_steps_cpu_s"),
        "step (ms)": f.get("wall_ms"),
        "its CPU (ms)": f.get("cpu_ms"),
        "steps": f.get("steps"),
        "compiles": counted.get("compiles"),
        "last before": f.get("last_compile"),
        "programs": counted.get("executions"),
        "host ops": counted.get("host_ops"),
        "fallbacks": counted.get("fallbacks"),
        "difference": f.get("failed") or (max(differences) if differences else None),
    }


def ratios_of(runs: dict[str, dict[str, Figures]]) -> Iterator[dict[str, Any]]:
    """A line for each program and runner but torch, and geometric means in the last lines."""
    found: dict[str, list[dict[str, float]]] = {}
    for program, own in runs.items():
        reference = own.get("torch", {})
        for runner, f in own.items():
            if runner != "torch" and "failed" not in {**reference, **f} and reference:
                ratios = {name: f[key] / reference[key] for name, key in RATIOS.items()}
                found.setdefault(runner, []).append(ratios)
                yield {"program": program, "runner": runner, **ratios}
    for runner, rows in found.items():
        means = {k: math.exp(sum(math.log(r[k]) for r in rows) / len(rows)) for k in RATIOS}
        yield {"program": f"geometric mean of {len(rows)}", "runner": runner, **means}


if __name__ == "__main__":
    main()

"""One workload in one framework, measured in this process: prints the figures as JSON.

Started by ``models.py``, once on one pinned core with nothing compiled before, and once free to use
every core, with what the first process left in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
from jobs import Job

# Environment of each runner beside the cache folder.
RUNNERS: dict[str, dict[str, str]] = {
    "torch": {},
    "jax": {},
    "jax3d": {},
    "jax_nhwc": {},
    # `torch.compile` on PyTorch's own device.
    "inductor": {},
    # What runs where nothing is set: CPU kernels, and programs where they are faster.
    "tiers": {"TPU_EAGER_MODE": "fused", "TPU_TIERS": "auto"},
    "strict": {"TPU_EAGER_MODE": "strict", "TPU_TIERS": "compiled"},
    "fused": {"TPU_EAGER_MODE": "fused", "TPU_COMPILE": "blocking", "TPU_TIERS": "compiled"},
    # Model, loss and optimizer by `torch.compile`, what is left in fused mode.
    "compiled": {"TPU_EAGER_MODE": "fused", "TPU_COMPILE": "blocking", "TPU_TIERS": "compiled"},
    # With what strict has left in the cache: pieces to run while programs are compiled.
    "background": {"TPU_EAGER_MODE": "fused", "TPU_COMPILE": "background", "TPU_TIERS": "compiled"},
}
OURS = ("tiers", "strict", "fused", "compiled", "background")
_STEADY = 1.5  # times the median: what still counts as a steady unit
_MOST_UNTIMED = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=jobs.SPECS)
    parser.add_argument("runner", choices=RUNNERS)
    parser.add_argument("--materials", type=Path, required=True)
    parser.add_argument("--units", type=int, required=True, help="timed units of steps")
    parser.add_argument("--pinned", action="store_true", help="use one core")
    options = parser.parse_args()
    if options.pinned:
        # Before any framework starts its threads.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    job, compiles = prepare(options.workload, options.runner, options.materials)
    figures = measure(job, jobs.SPECS[options.workload].steps, options.units, compiles)
    print(json.dumps(figures))


def prepare(workload: str, runner: str, materials: Path) -> tuple[Job, Callable[[], float]]:
    """The job, and a function that says how many programs were compiled."""
    if runner.startswith("jax"):
        return prepare_jax(workload, runner, materials)
    import torch
    import workloads

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if runner not in OURS:
        # PyTorch calls its devices as JAX calls its platforms.
        device = os.environ["TPU_PLATFORM"]
        return workloads.build(workload, device, compiled=runner == "inductor"), lambda: 0
    job = workloads.build(workload, "tpu", compiled=runner == "compiled")
    torch.tpu.synchronize()

    def memory() -> int:
        torch.tpu.reset_peak_memory_stats()
        read(job.step(0))
        return int(torch.tpu.max_memory_allocated())

    def begun() -> float:
        metrics = torch.tpu.metrics()
        return metrics["compiles"] + metrics["compiles_pending"]

    return Job(job.step, memory), begun


def prepare_jax(workload: str, runner: str, materials: Path) -> tuple[Job, Callable[[], float]]:
    import jax
    import jax_workloads

    job = jax_workloads.build(workload, runner, materials)
    count = 0

    def listener(event: str, seconds: float, **details: Any) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listener)
    return job, lambda: count


def measure(job: Job, steps: int, units: int, compiles: Callable[[], float]) -> dict[str, Any]:
    """Run a first step, then units of ``steps`` steps, and read the result after each unit.

    Units are timed once two have run and the last compiled nothing, or after `_MOST_UNTIMED`.

    Returns:
        Seconds of the first step and until the units are steady, medians of a unit's step and how
        far the units lie apart, what was compiled and when, memory, and the first results.
    """
    walls, cpus, results, marks = [], [], [], {}
    compiled_before, done = compiles(), 0
    untimed = 0  # of units: the first two may compile, and so may those that find new sizes
    while len(cpus) < 1 + untimed + units:
        size = steps if cpus else 1
        wall, cpu, compiled = time.perf_counter(), cpu_time(), compiles()
        for _ in range(size):
            result = job.step(done)
            done += 1
            if done in (1, 3, 20):
                marks[done] = compiles()
        results.append(read(result))
        walls.append((time.perf_counter() - wall) / size)
        cpus.append((cpu_time() - cpu) / size)
        is_first = len(cpus) - 1 == untimed
        if is_first and (untimed < 2 or (compiles() > compiled and untimed < _MOST_UNTIMED)):
            untimed += 1
    end = compiles()
    timed = slice(1 + untimed, None)
    cpu_median, wall_median = statistics.median(cpus[timed]), statistics.median(walls[timed])
    steady = next(
        (i for i in range(1, len(cpus)) if max(cpus[i : i + 3]) <= _STEADY * cpu_median), 1
    )
    until_steady = walls[0] + sum(walls[1:steady]) * steps
    figures = {
        "cpu_ms": cpu_median * 1e3,
        "cpu_spread": (max(cpus[timed]) - min(cpus[timed])) / cpu_median,
        "wall_ms": wall_median * 1e3,
        "first_s": walls[0],
        "first_cpu_s": cpus[0],
        "until_steady_s": until_steady,
        "compiles": end - compiled_before,
        "compiles_after_3": end - marks[3] if 3 in marks else None,
        "compiles_after_20": end - marks[20] if 20 in marks else None,
        "compiles_later": end - marks[1],
        "resident_mb": resident_mb(),
        "results": results[:20],
        "steps": units * steps,
    }
    peak = job.memory()
    return {**figures, "peak_mb": None if peak is None else peak / 2**20}


def cpu_time() -> float:
    """Seconds of this process and of those it has waited for, such as C++ compilers."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def read(result: Any) -> float:
    """Wait for a result: a number, or a tensor or array of one."""
    return float(result.item() if hasattr(result, "item") else result)


def resident_mb() -> float:
    """Most memory this process ever held; `ru_maxrss` would count the process that started it."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used / (2**20 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()

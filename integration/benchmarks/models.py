"""Whole models against torch on the CPU and against pure JAX, each in processes of its own.

Every runner of a workload starts twice: once pinned to one core with an empty cache, which gives
CPU time a step, the first step and the compiles; once more on all cores with the cache that the
first left, which gives wall time a step and what a second process pays. Ratios are of CPU time on
one core: they hold on a busy machine, wall time does not. On an accelerator no process is pinned,
and PyTorch runs on its own device of that name.

    python integration/benchmarks/models.py --only mlp,gpt --runners fused,jax --json out.json
    python integration/benchmarks/models.py --platform cuda --quick --steps 50 --runners torch,fused
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import jobs
import measure
import targets

HERE = Path(__file__).parent
# Where a form of JAX is the same program as another one.
_FORMS = {
    "jax3d": ("gpt", "rnn_dynamic", "accum", "bert"),
    "jax_nhwc": ("resnet18", "resnet50", "mobilenet_v2"),
    "background": ("accum",),
    "compiled": ("mlp", "gpt", "resnet18", "rnn_dynamic", *jobs.INFERENCE),
    "inductor": ("rnn_dynamic",),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, runners = ",".join(jobs.SPECS), ",".join(measure.RUNNERS)
    parser.add_argument("--only", default=names, help=f"workloads, of {names}")
    parser.add_argument("--runners", default=runners, help=f"of {runners}")
    parser.add_argument("--steps", type=int, help="timed steps, not each workload's own number")
    parser.add_argument("--quick", action="store_true", help="5 steps, no second process")
    parser.add_argument("--platform", default="cpu", help="cpu, or an accelerator such as cuda")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    chosen = parser.parse_args()
    for option, known in (("only", jobs.SPECS), ("runners", measure.RUNNERS)):
        values = getattr(chosen, option).split(",")
        if unknown := [v for v in values if v not in known]:
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(known)}")
        setattr(chosen, option, values)
    return chosen


def main() -> None:
    chosen = options()
    runs: targets.Runs = {}
    for workload in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            materials = Path(folder) / "materials.npz"
            if any(r.startswith("jax") for r in chosen.runners):
                harness.export(workload, materials)
            for runner in chosen.runners:
                if workload in _forms(runner, chosen.platform, workload):
                    cache = Path(folder) / ("strict" if runner == "background" else runner)
                    runs[workload, runner] = run(workload, runner, materials, cache, chosen)
        own = {r: f for (w, r), f in runs.items() if w == workload}
        agree(workload, {r: f["results"] for r, f in own.items()})
        # Now, so that what follows cannot lose it.
        harness.report(workload, [row(r, f) for r, f in own.items()], chosen)
    if derived := targets.rows(runs):
        harness.report("Targets", derived, chosen)


def _forms(runner: str, platform: str, workload: str) -> tuple[str, ...]:
    """Workloads that a runner has."""
    if runner == "inductor" and platform != "cpu":
        return (workload,)  # that of PyTorch's own device is what to compare with
    return _FORMS.get(runner, (workload,))


def run(
    workload: str, runner: str, materials: Path, cache: Path, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Figures of the first process, with those of the second one as ``warm``."""
    spec = jobs.SPECS[workload]
    steps = chosen.steps or (5 if chosen.quick else spec.units * spec.steps)
    units = max(1, steps // spec.steps)
    # On one core a process that compiles meanwhile would have a tenth of it.
    pinned = runner != "background" and chosen.platform == "cpu"
    inputs = (workload, runner, chosen.platform, materials, cache, units)
    figures = process(*inputs, pinned=pinned)
    if not chosen.quick:
        figures["warm"] = process(*inputs, pinned=False)
    elif not pinned:
        figures["wall"] = figures["wall_ms"]
    # Now, as a runner that follows may be stopped.
    took = f"{figures['wall_ms']:.3g} ms a step, the first {figures['first_s']:.3g} s"
    print(f"{workload}, {runner}: {took}, {figures['compiles']:g} compiles", file=sys.stderr)
    return figures


def process(
    workload: str,
    runner: str,
    platform: str,
    materials: Path,
    cache: Path,
    units: int,
    *,
    pinned: bool,
) -> dict[str, Any]:
    """Run ``measure.py`` and return its figures.

    Raises:
        RuntimeError: It failed; the message holds what it printed.
    """
    threads = "1" if pinned else str(os.cpu_count())
    environment = {
        **os.environ,
        **measure.RUNNERS[runner],
        "TPU_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TPU_PLATFORM": platform,
        # Constants are made on the host.
        "JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu",
        "OMP_NUM_THREADS": threads,
        # Only the device that is measured, so that the others' processes are their own.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(runner in measure.OURS)),
    }
    command = [sys.executable, str(HERE / "measure.py"), workload, runner]
    command += ["--materials", str(materials), "--units", str(units), *["--pinned"] * pinned]
    print(f"{workload}, {runner}, {'one core' if pinned else 'all cores'}", file=sys.stderr)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def agree(workload: str, results: dict[str, list[float]]) -> None:
    """Check that all runners computed the same.

    Raises:
        ValueError: Two of them differ by more than rounding: their times say nothing.
    """
    spec = jobs.SPECS[workload]
    (first, expected), *others = results.items()
    for runner, values in others:
        pairs = list(zip(expected, values))[: spec.compared]
        if any(not abs(a - b) <= spec.tolerance * max(abs(a), abs(b)) for a, b in pairs):
            raise ValueError(
                f"{workload}: {first} and {runner} computed different results: "
                f"{expected[: spec.compared]} and {values[: spec.compared]}."
            )


def row(runner: str, f: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    warm = f.get("warm", {})
    return {
        "runner": runner,
        "CPU (ms)": f["cpu_ms"],
        "its spread (%)": f["cpu_spread"] * 100,
        "wall, all cores (ms)": warm.get("wall_ms", f.get("wall")),
        "first step (s)": f["first_s"],
        "its CPU (s)": f["first_cpu_s"],
        "until steady (s)": f["until_steady_s"],
        "second process (s)": warm.get("first_s"),
        "compiles": f["compiles"],
        "after step 3": f["compiles_after_3"],
        "after step 20": f["compiles_after_20"],
        "of second process": warm.get("compiles"),
        "peak device (MB)": f["peak_mb"],
        "resident (MB)": f["resident_mb"],
    }


if __name__ == "__main__":
    main()

"""Where the time of a step goes: each op of the optimized program, from a profile of one process.

The least time of an op over all steps is taken, so that other load on the machine counts little;
the step's own CPU time beside the sum says what is spent outside the programs.

    python integration/benchmarks/op_times.py gpt fused --steps 10
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness
import jobs
import measure

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_WARM = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=jobs.SPECS)
    parser.add_argument("runner", choices=[r for r in measure.RUNNERS if r != "torch"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--top", type=int, default=40, help="ops to show")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= measure.RUNNERS[options.runner]
        os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_PLATFORM": "cpu", "TPU_CACHE": "off"}
        flags = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        materials = folder / "materials.npz"
        if options.runner.startswith("jax"):
            harness.export(options.workload, materials)
        job, _ = measure.prepare(options.workload, options.runner, materials)
        cpu_ms = profile(job, options.steps, folder / "trace")
        rows = op_rows(folder, options.steps)
    inside = sum(row["ms"] for row in rows)
    title = f"{options.workload}, {options.runner}: {cpu_ms:.1f} ms a step, {inside:.1f} ms in ops"
    harness.report(title, rows[: options.top], options)


def profile(job: jobs.Job, steps: int, folder: Path) -> float:
    """Write a profile of ``steps`` steps; returns the CPU milliseconds of one without profiler."""
    import jax

    for i in range(_WARM):
        measure.read(job.step(i))
    started = time.process_time()
    for i in range(steps):
        measure.read(job.step(_WARM + i))
    cpu_ms = (time.process_time() - started) / steps * 1e3
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        for i in range(steps):
            measure.read(job.step(_WARM + steps + i))
    return cpu_ms


def op_rows(folder: Path, steps: int) -> list[dict[str, Any]]:
    """One row for each op of the optimized programs, slowest first."""
    import jax

    times: dict[str, list[float]] = defaultdict(list)
    (file,) = folder.glob("trace/**/*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    times[stats["hlo_op"]].append(event.duration_ns / 1e6)
    texts = {}
    for path in folder.glob("hlo/*after_optimizations.txt"):
        for line in path.read_text().splitlines():
            if match := _INSTRUCTION.match(line):
                text = re.split(r", (?:metadata|backend_config|calls|kind)=", match[2])[0]
                texts.setdefault(match[1], text)
    rows = [
        {"op": op, "ms": min(t) * len(t) / steps, "runs": len(t) / steps, "what": texts.get(op, "")}
        for op, t in times.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


if __name__ == "__main__":
    main()

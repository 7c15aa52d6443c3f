"""What the installed packages add to ``import torch``.

Fresh interpreters, with and without autoload in turn, so that both see the same machine. CPU time
of the process is the figure to compare; wall time depends on what else the machine does.

    python integration/benchmarks/import_time.py --runs 10
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import harness

_MEASURE = """
import json, time
wall, cpu = time.perf_counter(), time.process_time()
import torch
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def import_torch(autoload: bool) -> tuple[float, float]:
    """Milliseconds of ``import torch`` in a new interpreter: (wall, CPU)."""
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))},
        capture_output=True,
        text=True,
        check=True,
    )
    wall, cpu = json.loads(result.stdout)
    return wall * 1e3, cpu * 1e3


def main() -> None:
    options = harness.arguments(__doc__, runs=10)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    import_torch(True)  # the file system's cache
    for _ in range(options.runs):
        for autoload in times:
            times[autoload].append(import_torch(autoload))
    rows = []
    for i, clock in enumerate(("wall", "CPU")):
        without, with_ = (statistics.median(t[i] for t in times[a]) for a in (False, True))
        rows.append(
            {
                "clock": clock,
                "without (ms)": without,
                "with (ms)": with_,
                "added (ms)": with_ - without,
            }
        )
    harness.report("import torch, medians", rows, options)


if __name__ == "__main__":
    main()

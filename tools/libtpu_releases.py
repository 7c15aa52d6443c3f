"""What each release of libtpu makes of programs that were compiled ahead of time, as a table.

``TPU_DUMP=programs nox -s tpu_aot`` keeps the programs of the models, kernels and divided
steps. ``python tools/libtpu_releases.py programs LIBTPU.so ...`` compiles each with each library,
each in a process that the library may end, and writes ``libtpu.json`` beside them. A row that
differs from the first library's is a regression, or a mend: it belongs in
``tpu_core.pjrt.known_faults``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_compile.aot import worker
from tpu_core.extend import LibtpuTopology

TIMEOUT = 600.0


def programs(folder: Path) -> Iterator[Path]:
    """Folders with a program and the topology that it is for."""
    yield from sorted(file.parent for file in folder.glob("*/request.json"))


def outcome(program: Path, library: Path) -> dict[str, Any]:
    """Result of compiling a program: ``error``, or ``seconds``, peak ``memory`` and ``version``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("program.mlirbc", "request.json"):
            shutil.copy(program / file, folder)
        command = [sys.executable, "-P", worker.__file__, inspect.getfile(LibtpuTopology), name]
        env = {**os.environ, **LibtpuTopology.ENVIRONMENT, "TPU_LIBRARY_PATH": str(library)}
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command, env=env, timeout=TIMEOUT, capture_output=True, text=True, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {TIMEOUT:.0f} s"}
        seconds = time.perf_counter() - started
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Check failed" in line]
            return {"error": f"ended the process ({done.returncode}): {' '.join(lines[:1])}"}
        result = json.loads((folder / "result.json").read_text())
        if "error" in result:
            return {"error": result["error"]}
        memory = result["memory"]["peak"]
        return {"seconds": seconds, "memory": memory, "version": result["platform_version"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("programs", type=Path)
    parser.add_argument("libraries", type=Path, nargs="+", help="libtpu.so of each release")
    options = parser.parse_args()
    seen: dict[str, dict[str, Any]] = {}
    for program in programs(options.programs):
        row = seen[program.name] = {"topology": json.loads((program / "request.json").read_text())}
        for library in options.libraries:
            row[str(library)] = result = outcome(program, library)
            said = result.get("error") or f"{result['seconds']:.1f} s, {result['memory']:,} bytes"
            print(program.name, row["topology"]["topology"], library, said[:200], flush=True)
        (options.programs / "libtpu.json").write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()

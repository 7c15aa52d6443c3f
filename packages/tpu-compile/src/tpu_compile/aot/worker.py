"""The process that libtpu runs in.

It reads ``request.json`` and ``program.mlirbc`` in a folder and writes what became of them there.
Some programs abort libtpu; `tpu_compile.aot.process` starts a worker for each and outlives it. The
worker is run by its path, and so is the one module that it needs: torch, which takes longer to
import than a small program to compile, stays out.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def main(topologies: Path, folder: Path) -> None:
    """Compile the program in ``folder``.

    Writes ``result.json`` with ``error``, libtpu's message, or with ``memory``, ``cost`` and
    ``platform_version``; and ``program.hlo`` and ``executable``.

    Args:
        topologies: The file of `tpu_core.pjrt.topologies`.
        folder: With the program.
    """
    compile_for_topology = _module(topologies).compile_for_topology
    request = json.loads((folder / "request.json").read_text())
    program = (folder / "program.mlirbc").read_bytes()
    try:
        made = compile_for_topology(program, request["topology"], request["mesh"])
    except Exception as error:
        (folder / "result.json").write_text(json.dumps({"error": str(error)}))
        return
    (folder / "program.hlo").write_text(made.text)
    (folder / "executable").write_bytes(made.executable)
    result = {
        "memory": made.memory,
        "cost": made.cost,
        "platform_version": made.platform_version,
    }
    (folder / "result.json").write_text(json.dumps(result))


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

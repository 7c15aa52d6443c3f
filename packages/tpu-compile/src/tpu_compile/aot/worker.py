"""The process that libtpu runs in: ``python -m tpu_compile.aot.worker FOLDER``.

It reads ``request.json`` and ``program.mlirbc`` in the folder and writes what became of them there.
Some programs abort libtpu; `tpu_compile.aot.process` starts a worker for each and outlives it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Compile the program in ``folder``.

    Writes ``result.json`` with ``error``, libtpu's message, or with ``memory``, ``cost`` and
    ``platform_version``; and ``program.hlo``, ``buffers.pb`` and ``executable``.
    """
    from tpu_core.pjrt.topologies import compile_for_topology

    request = json.loads((folder / "request.json").read_text())
    program = (folder / "program.mlirbc").read_bytes()
    try:
        made = compile_for_topology(program, request["topology"], request["mesh"])
    except Exception as error:
        (folder / "result.json").write_text(json.dumps({"error": str(error)}))
        return
    (folder / "program.hlo").write_text(made.text)
    (folder / "buffers.pb").write_bytes(made.buffers)
    (folder / "executable").write_bytes(made.executable)
    result = {
        "memory": made.memory,
        "cost": made.cost,
        "platform_version": made.platform_version,
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Start the worker that libtpu runs in, and turn what can go wrong there into errors."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_compile.aot import worker
from tpu_compile.aot.chips import Topology
from tpu_core.config import config
from tpu_core.errors import (
    KernelCompilationError,
    LibtpuMissingError,
    TopologyCompilationError,
    UnknownTopologyError,
)
from tpu_core.extend import LibtpuTopology

_LOG_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """Result of compiling a program in the worker.

    Attributes:
        seconds: Wall time of the worker.
        out_of_memory: libtpu's message where the program does not fit, else empty; nothing of what
            follows is known then.
        text, memory, cost, executable, platform_version: See
            `tpu_core.pjrt.topologies.Compiled`.
    """

    seconds: float
    out_of_memory: str = ""
    text: str = ""
    memory: Mapping[str, int] | None = None
    cost: Mapping[str, float] | None = None
    executable: bytes = b""
    platform_version: str = ""


def compile_program(program: bytes, topology: Topology, mesh: Mapping[str, int]) -> Outcome:
    """Compile StableHLO bytecode for a topology in a process of its own.

    Args:
        program: The bytecode, with shardings over ``mesh``.
        topology: For what.
        mesh: Size of each axis.

    Raises:
        LibtpuMissingError: It is not installed.
        TopologyCompilationError: libtpu refused the program or ended the process.
        UnknownTopologyError: libtpu does not know the topology.
    """
    require_libtpu()
    with tempfile.TemporaryDirectory(prefix="tpu-aot-") as name:
        folder = Path(name)
        (folder / "program.mlirbc").write_bytes(program)
        request = {"topology": topology.name, "mesh": dict(mesh)}
        (folder / "request.json").write_text(json.dumps(request))
        started = time.perf_counter()
        with (folder / "log").open("wb") as log:
            code = subprocess.run(
                _command(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
            ).returncode
        seconds = time.perf_counter() - started
        _dump(folder)
        if code:
            raise _crash(code, (folder / "log").read_text(errors="replace"), topology)
        result = json.loads((folder / "result.json").read_text())
        if "error" in result:
            return _refusal(result["error"], topology, seconds)
        return Outcome(
            seconds,
            text=(folder / "program.hlo").read_text(),
            executable=(folder / "executable").read_bytes(),
            **result,
        )


def require_libtpu() -> None:
    """Raise unless libtpu is there.

    Raises:
        LibtpuMissingError: It is not.
    """
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissingError("libtpu is not installed: it compiles for TPUs.")


def _command(folder: Path) -> list[str]:
    # -P: modules beside the worker have names of the standard library's.
    return [sys.executable, "-P", worker.__file__, _topologies(), str(folder)]


def _topologies() -> str:
    """The file that holds the compiler's call; the worker runs it without its package."""
    return inspect.getfile(LibtpuTopology)


def _environment() -> dict[str, str]:
    # jax and libtpu are those of this process, wherever it found them.
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, **LibtpuTopology.ENVIRONMENT, "PYTHONPATH": path}


def _dump(folder: Path) -> None:
    target = config().dump_dir
    if target is None:
        return
    kept = Path(target) / folder.name
    kept.mkdir(parents=True, exist_ok=True)
    for file in ("program.mlirbc", "request.json", "program.hlo", "log"):
        if (folder / file).exists():
            shutil.copy(folder / file, kept / file)


def _crash(code: int, log: str, topology: Topology) -> TopologyCompilationError:
    lines = [line for line in log.splitlines() if line.strip()]
    # The stack of a crash says nothing to a user; what it was about stands before.
    reasons = [
        line for line in lines if "Check failed" in line or "Error" in line or "F0" in line[:2]
    ]
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    killed = code == -signal.SIGKILL
    return TopologyCompilationError(
        f"libtpu ended while compiling for {topology.name} ({name}).",
        values={"its last lines": "\n    " + "\n    ".join((reasons or lines)[-_LOG_LINES:])},
        remedy="The machine most likely ran out of memory: compile for fewer devices, or scan "
        "equal layers (scan=True)."
        if killed
        else None,
    )


def _refusal(message: str, topology: Topology, seconds: float) -> Outcome:
    of_a_kernel = KernelCompilationError.of_libtpu(message)
    if of_a_kernel is not None:
        raise of_a_kernel
    if "RESOURCE_EXHAUSTED" in message:
        return Outcome(seconds, out_of_memory=message)
    if "topology" in message.lower() and "INVALID_ARGUMENT" in message:
        raise UnknownTopologyError(f"libtpu does not know '{topology.name}': {message}")
    raise TopologyCompilationError(
        f"libtpu did not compile the program for {topology.name}: {message}"
    )

"""The process that compiles for another one: jobs on its input, executables on its output.

`tpu_core.compiler.workers` starts it. It sees the device's platform as its parent does, but keeps
no cache: what it makes, the parent stores.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

# Low, and yet some share of a machine whose cores are all busy with training.
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A segment to compile.

    Attributes:
        exported: As the extension exported it.
        module: Its StableHLO bytecode, where what its ops compute is known to this process alone.
        device: Index of its device.
    """

    exported: dict[str, Any] | None
    module: bytes | None
    device: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a job.

    Attributes:
        payload: The serialized executable, or None where there is none.
        seconds: Wall time of lowering and compiling.
        error: The exception.
        is_lost: The process ended without an answer, each time it was asked.
    """

    payload: bytes | None = None
    seconds: float = 0.0
    error: str = ""
    is_lost: bool = False


def compile_job(job: CompileJob, client: Any, device: int = 0) -> Result:
    """Lower and compile a segment.

    Args:
        job: The segment.
        client: A `tpu_core.pjrt.client.Client`.
        device: Index of the client's device to compile for.
    """
    from tpu_core.compiler import segment as segments
    from tpu_core.pjrt import client as pjrt

    started = time.perf_counter()
    try:
        module = job.module
        if module is None:
            assert job.exported is not None
            module = segments.lower(segments.Segment.from_export(job.exported))
        executable = pjrt.compile_module(module, client.devices[device], client)
        payload = pjrt.serialize(executable)
    except Exception as error:  # the parent compiles it itself, and has the error where it belongs
        return Result(error=f"{type(error).__name__}: {error}")
    return Result(payload, time.perf_counter() - started)


def main() -> None:
    """Answer jobs until the parent closes the input."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the replies
    os.nice(_NICENESS)
    client: Any = None
    while True:
        try:
            job = _receive(sys.stdin.buffer)
        except EOFError:
            return
        except Exception as error:  # such as a lowering that only the parent has registered
            result = Result(error=f"{type(error).__name__}: {error}")
        else:
            client = client or _start()
            result = compile_job(job, client)
        try:
            replies.write(pickle.dumps(result))
            replies.flush()
        except BrokenPipeError:
            return


def _receive(source: IO[bytes]) -> CompileJob:
    # The length comes first, so that a job that cannot be read is skipped as a whole.
    head = source.read(8)
    if len(head) < 8:
        raise EOFError
    data = source.read(int.from_bytes(head, "little"))
    from tpu_core import lowering

    lowering.load()
    job = pickle.loads(data)
    assert isinstance(job, CompileJob)
    return job


def _start() -> Any:
    from tpu_core.pjrt import client as pjrt

    return pjrt.start()

"""The process that compiles for another one: jobs on its input, executables on its output.

`tpu_eager.background.pool` starts it. It sees the device's platform as its parent does, but keeps
no cache: what it makes, the parent stores.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_core.extend import CompileJob

# Low, and yet some share of a machine whose cores are all busy with training.
_NICENESS = 10


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


def compile_job(job: CompileJob, client: Any = None) -> Result:
    """Lower and compile a segment.

    Args:
        job: The segment.
        client: The client that has its device; None for the device that this process opened.
    """
    started = time.perf_counter()
    try:
        payload = job.compile(client)
    except Exception as error:  # the parent compiles it itself, and has the error where it belongs
        return Result(error=f"{type(error).__name__}: {error}")
    return Result(payload, time.perf_counter() - started)


def main() -> None:
    """Answer jobs until the parent closes the input."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the replies
    os.nice(_NICENESS)
    while True:
        try:
            job = _receive(sys.stdin.buffer)
        except EOFError:
            return
        except Exception as error:  # such as a lowering that only the parent has registered
            result = Result(error=f"{type(error).__name__}: {error}")
        else:
            job.open_device()
            result = compile_job(job)
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
    from tpu_core.extend import CompileJob, load_lowerings

    load_lowerings()
    job = pickle.loads(data)
    assert isinstance(job, CompileJob)
    return job

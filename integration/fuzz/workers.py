"""Child processes that run cases: forked from one that has imported torch but not started the
device, so that a new one costs half a second, and a crash ends only the child.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import TIERS, Case, Failure, Settings

_PR_SET_PDEATHSIG = 1  # Linux: a child ends with its parent, however that ends
# Share of a processor below which a process stands still: threads that poll need less, one that
# has work to do gets more on the busiest machine.
_STANDS_STILL = 0.003
_MOST = 10  # times the limit


def _write(fd: int, value: Any) -> None:
    data = pickle.dumps(value)
    data = struct.pack("<Q", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int, seconds: float | None = None) -> Any:
    """The next value from a pipe.

    Raises:
        TimeoutError: It did not come in time.
        EOFError: The writer ended.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    data, size = b"", 8
    header = True
    while True:
        while len(data) < size:
            if deadline is not None:
                left = max(deadline - time.monotonic(), 0)
                if not select.select([fd], [], [], left)[0]:
                    raise TimeoutError
            part = os.read(fd, size - len(data))
            if not part:
                raise EOFError
            data += part
        if not header:
            return pickle.loads(data)  # from our own child
        (size,), data, header = struct.unpack("<Q", data), b"", False


def processor_seconds(session: int) -> float:
    """Processor time that the living processes of a session have used."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Worker:
    """A child process that runs cases of one fuzzer.

    Args:
        fuzzer: The fuzzer; the child has the parent's copy.
        settings: Environment of the child.
    """

    def __init__(self, fuzzer: Any, settings: Settings) -> None:
        self.cases: list[Case] = []  # what it has run, in order
        self._fuzzer = fuzzer
        self.log = tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".log")
        asks, self._to = os.pipe()
        self._from, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            code = 1
            try:
                os.close(self._to)
                os.close(self._from)
                os.setsid()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(self.log.fileno(), 1)
                os.dup2(self.log.fileno(), 2)
                faulthandler.enable(open(2, "w", closefd=False))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                settings.apply()
                _serve(fuzzer, settings, asks, answers)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)  # the parent's exit handlers are not ours
        os.close(asks)
        os.close(answers)

    def run(self, case: Case, seconds: float) -> Failure | None:
        """Run a case; ends the child where it crashes or takes more than ``seconds``."""
        self.cases.append(case)
        try:
            _write(self._to, case)
            return self._answer(seconds)
        except TimeoutError:
            os.kill(self._child, signal.SIGABRT)  # faulthandler prints where
            time.sleep(0.5)
            self.close()
            return Failure("timeout", self._key(case), f"{seconds:.0f} s\n{self._tail()}")
        except (EOFError, BrokenPipeError):
            status = self.close()
            ignores = getattr(self._fuzzer, "ignores", None)
            if ignores and ignores(self._tail()):
                return None
            how = os.waitstatus_to_exitcode(status) if status is not None else None
            return Failure("crash", self._key(case), f"exit status {how}\n{self._tail()}")

    def _answer(self, seconds: float) -> Failure | None:
        """What the child answers. On a busy machine it may take longer, as long as it computes.

        Raises:
            TimeoutError: After ``seconds`` of processor time, or where it stands still.
            EOFError: The child ended.
        """
        begun = used = processor_seconds(self._child)
        waited, wait = 0.0, seconds
        while not select.select([self._from], [], [], wait)[0]:
            before, used = used, processor_seconds(self._child)
            waited += wait
            stands = used - before < _STANDS_STILL * wait
            if stands or used - begun >= seconds or waited >= _MOST * seconds:
                raise TimeoutError
            wait = seconds / 4
        answer: Failure | None = _read(self._from, seconds)
        return answer

    def _key(self, case: Case) -> str:
        key = getattr(self._fuzzer, "key", None)
        return key(case) if key else case.fuzzer

    @property
    def alive(self) -> bool:
        return self._child > 0

    def _tail(self) -> str:
        return Path(self.log.name).read_text(errors="replace")[-3000:]

    def close(self) -> int | None:
        """End the child; returns the status that it ended with."""
        if not self.alive:
            return None
        os.close(self._to)
        os.close(self._from)
        child, self._child = self._child, 0
        for _ in range(20):  # one that crashes writes its frames first
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status
            time.sleep(0.01)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]


def use_tiers(name: str) -> None:
    """Switch this process's tiers to those of a case; nothing is pending then."""
    if not name:
        return
    import torch

    from tpu_core.tiers import switch

    torch.tpu.synchronize()
    switch(*TIERS[name])


def _serve(fuzzer: Any, settings: Settings, asks: int, answers: int) -> None:
    import torch

    torch.set_num_threads(1)
    if settings.planted:
        from . import planted

        planted.apply(settings.planted)
    if hasattr(fuzzer, "start"):
        fuzzer.start()
    while True:
        try:
            case = _read(asks)
        except EOFError:
            return
        try:
            use_tiers(case.tiers)
            failure = fuzzer.run(case)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} in {Path(last.filename).name}:{last.name}"
            failure = Failure("exception", where, traceback.format_exc())
        gc.collect(0)
        _write(answers, failure)


def run_alone(
    fuzzer: Any, cases: Sequence[Case], settings: Settings, seconds: float
) -> Failure | None:
    """Run cases one after the other in a new process; returns the first failure."""
    worker = Worker(fuzzer, settings)
    try:
        for case in cases:
            failure = worker.run(case, seconds)
            if failure:
                return failure
        return None
    finally:
        worker.close()

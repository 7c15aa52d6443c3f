"""A few processes of low priority that compile, and the threads that talk to them."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tpu_core.extend import CompileJob
from tpu_eager.background.worker import Result, compile_job

logger = logging.getLogger("tpu_core")  # whose level is TPU_LOG

# A worker that has had nothing to do for so long ends, with the memory that it holds.
_IDLE_SECONDS = 60.0
# A job that ends its process is tried once more: the system may have been short of memory.
_ATTEMPTS = 2

MakeJob = Callable[[], CompileJob]
Done = Callable[[Result], None]


class WorkerProcess:
    """One process that compiles one job at a time.

    It is of this process' interpreter and finds modules where this one does.
    """

    def __init__(self) -> None:
        code = (
            "import sys; sys.path[:] = sys.argv[1:]; "
            "from tpu_eager.background.worker import main; main()"
        )
        environment = {
            **os.environ,
            "TPU_COMPILE": "blocking",
            "TPU_CACHE": "off",
            "TPU_NUM_DEVICES": "1",
            "TPU_VISIBLE_DEVICES": "",
        }
        # A session of its own: Ctrl-C is for the program, and the end of the input ends the worker.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._process.pid

    def compile(self, job: bytes) -> Result:
        """Send a pickled `CompileJob` and wait for its result.

        Raises:
            Exception: The process has ended, or what it said cannot be read: mostly an OSError,
                EOFError or pickle.UnpicklingError.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(len(job).to_bytes(8, "little") + job)
        self._process.stdin.flush()
        result = pickle.load(self._process.stdout)
        assert isinstance(result, Result)
        return result

    def kill(self) -> None:
        """End the process, whatever it does; any thread may ask, and `compile` then raises."""
        self._process.kill()

    def close(self) -> None:
        """End the process and close its pipes; for the thread that calls `compile`.

        A pipe that another thread closes while this one reads it leaves the reader without its
        buffer, and its number may by then be another file's.
        """
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                try:
                    pipe.close()
                except OSError:  # what it could not be sent
                    pass


class InProcess:
    """Compiles in this process, where another one could not open the device.

    XLA compiles without the GIL; lowering holds it.

    Args:
        client: The client that has the devices.
    """

    pid = os.getpid()

    def __init__(self, client: Any) -> None:
        self._client = client

    def compile(self, job: bytes) -> Result:
        """Compile a pickled `CompileJob` for its own device."""
        loaded: CompileJob = pickle.loads(job)
        return compile_job(loaded, self._client)

    def kill(self) -> None:
        """Nothing: what is under way ends by itself."""

    close = kill


class Workers:
    """Compiles jobs in at most ``most`` processes, which start when they are needed.

    Args:
        most: Number of processes.
        start: Starts one.

    Example:
        >>> workers = Workers(1)
        >>> workers.submit(lambda: CompileJob(exported, None, 0), lambda r: store(r.payload))
        >>> workers.wait(timeout=60)
        True
    """

    def __init__(
        self, most: int, start: Callable[[], WorkerProcess | InProcess] = WorkerProcess
    ) -> None:
        self._most, self._start_process = most, start
        self._jobs: deque[tuple[MakeJob, Done]] = deque()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._processes: set[WorkerProcess | InProcess] = set()
        self._waiting = 0  # threads without a job
        self._pending = 0  # jobs without a result
        self._closed = False

    def submit(self, job: MakeJob, done: Done) -> None:
        """Compile what ``job()`` gives, and call ``done(result)``; both in another thread."""
        with self._changed:
            if self._closed:
                return
            self._jobs.append((job, done))
            self._pending += 1
            if not self._waiting and len(self._threads) < self._most:
                # A daemon, so that the interpreter's end reaches `close`.
                thread = threading.Thread(target=self._serve, name="tpu compile", daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every job has its result.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Returns:
            Whether they have.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        with self._changed:
            return [process.pid for process in self._processes]

    def close(self) -> None:
        """Give up what has not been compiled, and end the processes."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            processes, threads = list(self._processes), list(self._threads)
            self._changed.notify_all()
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        process: WorkerProcess | InProcess | None = None
        try:
            while (item := self._next()) is not None:
                job, done = item
                result, process = self._compile(job, process)
                if not self._closed:
                    try:
                        done(result)
                    except Exception:
                        logger.exception("a program that was compiled in the background is lost")
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()
        finally:
            self._drop(process)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> tuple[MakeJob, Done] | None:
        """The next job; None where it is time to end."""
        with self._changed:
            deadline = time.monotonic() + _IDLE_SECONDS
            self._waiting += 1
            while not self._jobs and not self._closed and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            self._waiting -= 1
            if self._jobs:
                return self._jobs.popleft()
            # From here on `submit` must not count on this thread.
            self._threads.discard(threading.current_thread())
            return None

    def _compile(
        self, job: MakeJob, process: WorkerProcess | InProcess | None
    ) -> tuple[Result, WorkerProcess | InProcess | None]:
        try:
            data = pickle.dumps(job())
        except Exception as error:
            return Result(error=f"the segment cannot be sent: {error}"), process
        for _ in range(_ATTEMPTS):
            if self._closed:
                break
            try:
                process = process or self._start()
                return process.compile(data), process
            except Exception as error:  # half an answer is read as anything
                if not self._closed:
                    logger.info("a compile process ended: %s", str(error) or "no answer")
                self._drop(process)
                process = None
        return Result(error="its compile process ended", is_lost=True), None

    def _start(self) -> WorkerProcess | InProcess:
        process = self._start_process()
        with self._changed:
            self._processes.add(process)
            closed = self._closed
        if closed:
            self._drop(process)
            raise EOFError
        return process

    def _drop(self, process: WorkerProcess | InProcess | None) -> None:
        if process is not None:
            process.close()
            with self._changed:
                self._processes.discard(process)

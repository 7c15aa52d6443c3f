"""Segments that run in pieces while another process compiles them."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from tpu_core import modes
from tpu_core.compiler.jobs import CompileJob
from tpu_core.config import override
from tpu_core.errors import BackgroundCompileWarning, RecompilationError
from tpu_core.lowering.registry import REGISTRY
from tpu_core.metrics import METRICS, CompileEvent
from tpu_core.recorder.compute import LoweringCompute, _lowering_of_name
from tpu_core.runtime import runtime
from tpu_eager import fused
from tpu_eager.background import pool as workers
from tpu_eager.background.scheduler import Background
from tpu_eager.fused import FUSED

WAIT = 120.0  # for a worker, which has a low priority


@pytest.fixture(autouse=True)
def fused_in_background() -> Iterator[None]:
    # Without padded programs, which serve the sizes of several tests.
    mode = dataclasses.replace(FUSED, name="exact", providers=(fused.background,))
    with override(compile="background"), modes.using(mode):
        yield
        assert background().workers.wait(WAIT)


def background() -> Background:
    found: Background = runtime().builder.provider(fused.background)
    return found


def chain(x: torch.Tensor, *ops: str) -> torch.Tensor:
    for op in ops:
        x = getattr(torch, op)(x) + 0.5
    return x.cpu()


def known(x: torch.Tensor, *ops: str) -> torch.Tensor:
    """`chain`, whose ops have programs of their own afterwards."""
    with modes.using("strict"):
        return chain(x, *ops)


def counts(run: Callable[[], object]) -> tuple[int, int]:
    """(compiles, pieces) of a call."""
    before = torch.tpu.metrics()
    run()
    after = torch.tpu.metrics()
    compiles, pieces = (int(after[k] - before[k]) for k in ("compiles", "pieces"))
    return compiles, pieces


OPS = ("sin", "cos") * 20


def test_known_ops_run_at_once_and_the_whole_takes_over() -> None:
    x = torch.randn(11)
    y = x.to("tpu")
    known(y, "sin", "cos")
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(chain(y, *OPS))

    assert counts(run) == (0, 80)
    assert background().workers.wait(0)  # nothing is compiled for what was seen once
    assert counts(run)[1] == 80
    assert torch.tpu.metrics()["compiles_pending"] == 1
    assert background().workers.wait(WAIT)
    assert torch.tpu.metrics()["compiles_pending"] == 0
    event = METRICS.compile_events()[-1]
    assert (event.source, event.ops) == ("background", 80)
    assert "came again" in event.reason
    executions = torch.tpu.metrics()["executions"]
    assert counts(run) == (0, 0)
    assert torch.tpu.metrics()["executions"] == executions + 1
    want = chain(x, *OPS)
    for result in results:
        torch.testing.assert_close(result, want)


def test_what_does_not_come_again_is_never_compiled_as_a_whole() -> None:
    y = torch.randn(12).to("tpu")
    known(y, "sin", "cos", "tanh", "exp")
    names = ("sin", "cos", "tanh", "exp")

    def run() -> None:
        for i in range(4):
            chain(y, *(names[(i + k) % 4] for k in range(20 + i)))

    compiles, pieces = counts(run)
    assert (compiles, pieces) == (0, 2 * (20 + 21 + 22 + 23))


def test_unknown_ops_are_compiled_together_and_waited_for() -> None:
    y = torch.randn(13).to("tpu")
    assert counts(lambda: chain(y, "sin", "cos", "tanh", "exp")) == (1, 0)


def test_a_few_unknown_ops_among_many_known_ones_are_compiled_as_pieces() -> None:
    y = torch.randn(14).to("tpu")
    known(y, "sin", "cos")
    run = (*OPS * 4, "tanh")
    assert counts(lambda: chain(y, *run)) == (1, 2 * len(run))
    torch.testing.assert_close(chain(y, *run), chain(y.cpu(), *run))


def test_many_unknown_ops_are_compiled_together_however_many_are_known() -> None:
    y = torch.randn(16).to("tpu")
    known(y, "sin", "cos")
    # They are compiled in less time than the whole, and on a TPU each waits for the compiler.
    unknown = ("tanh", "erf", "expm1", "atan", "asinh", "sinh", "cosh", "sigmoid", "exp2")
    unknown = (*unknown, "log1p", "rsqrt")
    run = (*OPS * 8, *unknown)
    assert counts(lambda: chain(y, *run)) == (1, 0)
    torch.testing.assert_close(chain(y, *run), chain(y.cpu(), *run))


def test_a_program_on_disk_is_loaded_at_the_first_time() -> None:
    y = torch.randn(15).to("tpu")
    with override(compile="blocking"), modes.using(FUSED):
        chain(y, *OPS)
    known(y, "sin", "cos")
    torch.tpu.synchronize()
    from tpu_core import _C

    _C.clear_programs()
    known(y, "sin", "cos")
    assert counts(lambda: chain(y, *OPS)) == (0, 0)


def test_gradients_and_writes_in_pieces() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = w.clone().requires_grad_()
        hidden = x
        for _ in range(12):
            hidden = torch.tanh(hidden @ w) + hidden[:, :1]
        total = torch.zeros_like(x)
        total[:, 2:].add_(hidden.detach()[:, 2:])
        view = total.view(-1)
        view.mul_(2)
        hidden.square().mean().backward()
        assert w.grad is not None
        return w.grad.cpu(), total.cpu()

    x, w = torch.randn(6, 6), torch.randn(6, 6) / 4
    want = step(w, x)
    with modes.using("strict"):
        step(w.to("tpu"), x.to("tpu"))
    results = []
    compiles, pieces = counts(lambda: results.append(step(w.to("tpu"), x.to("tpu"))))
    assert pieces > 60
    for got, expected in zip(results[0], want):
        torch.testing.assert_close(got, expected)


def test_memory_of_intermediates_is_freed_as_pieces_run() -> None:
    y = torch.randn(1 << 18).to("tpu")  # 1 MiB
    known(y, "sin", "cos")
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    compiles, pieces = counts(lambda: chain(y, *OPS))
    assert pieces == 80
    assert torch.tpu.max_memory_allocated() - before <= 4 << 20


def test_numbers_that_vary_are_inputs_of_the_program_from_the_start() -> None:
    y = torch.randn(32).to("tpu")

    def run(base: torch.Tensor, start: int) -> torch.Tensor:
        x = base[:8]
        for _ in range(30):
            x = torch.cos(x + base[start : start + 8])
        return x.cpu()

    with modes.using("strict"):
        for start in (3, 4, 5):
            run(y, start)
    for start in (3, 4):
        assert counts(functools.partial(run, y, start))[1] > 0
    assert background().workers.wait(WAIT)
    for start in (5, 6, 7):
        assert counts(functools.partial(run, y, start)) == (0, 0)
        torch.testing.assert_close(run(y, start), run(y.cpu(), start))


@pytest.mark.of_cpu(reason="elsewhere this process compiles, as it holds the device")
def test_a_killed_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kill_workers(monkeypatch, times=1)
    y = torch.randn(17).to("tpu")
    known(y, "sin", "cos")
    for _ in range(2):
        chain(y, *OPS)
    assert background().workers.wait(WAIT)
    assert len(killed) == 1
    assert counts(lambda: chain(y, *OPS)) == (0, 0)
    torch.testing.assert_close(chain(y, *OPS), chain(y.cpu(), *OPS))


@pytest.mark.of_cpu(reason="elsewhere this process compiles, as it holds the device")
def test_what_ends_its_worker_each_time_stays_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kill_workers(monkeypatch, times=2)
    y = torch.randn(18).to("tpu")
    known(y, "sin", "cos")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            chain(y, *OPS)
        assert background().workers.wait(WAIT)
    assert len(killed) == 2
    (warning,) = [w for w in caught if issubclass(w.category, BackgroundCompileWarning)]
    assert "80 ops ended twice" in str(warning.message)
    assert "test_background.py" in str(warning.message)
    for _ in range(3):
        assert counts(lambda: chain(y, *OPS)) == (0, 80)
    torch.testing.assert_close(chain(y, *OPS), chain(y.cpu(), *OPS))


def kill_workers(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Kill the process of each of the next jobs once it has the job; the ids of the killed."""
    killed: list[int] = []
    compile_ = workers.WorkerProcess.compile

    def compile_and_kill(self: workers.WorkerProcess, job: bytes) -> object:
        if len(killed) < times:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)  # whatever it was about to do
            os.kill(self.pid, signal.SIGKILL)
        return compile_(self, job)

    monkeypatch.setattr(workers.WorkerProcess, "compile", compile_and_kill)
    return killed


def test_compiling_in_this_process_as_where_another_cannot_open_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = workers.Workers(1, functools.partial(workers.InProcess, runtime().client))
    monkeypatch.setattr(background(), "workers", pool)
    y = torch.randn(23).to("tpu")
    known(y, "sin", "cos")
    for _ in range(2):
        assert counts(lambda: chain(y, *OPS))[1] == 80
    assert pool.wait(WAIT)
    assert counts(lambda: chain(y, *OPS)) == (0, 0)
    torch.testing.assert_close(chain(y, *OPS), chain(y.cpu(), *OPS))
    pool.close()


@pytest.mark.of_cpu(reason="elsewhere this process compiles, as it holds the device")
def test_what_a_worker_cannot_lower_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(19).to("tpu")
    known(y, "sin", "cos")
    # As of a lowering that only this process has registered.
    unknown = _lowering_of_name, ("aten.sin.unknown", (), ())
    monkeypatch.setattr(LoweringCompute, "__reduce__", lambda self: unknown)
    chain(y, *OPS)
    chain(y, *OPS)
    assert background().workers.wait(WAIT)
    assert counts(lambda: chain(y, *OPS)) == (1, 0)
    torch.testing.assert_close(chain(y, *OPS), chain(y.cpu(), *OPS))


def test_no_recompile_lets_pieces_run_and_names_what_would_be_compiled() -> None:
    y = torch.randn(20).to("tpu")
    known(y, "sin", "cos")
    with torch.tpu.no_recompile():
        for _ in range(3):
            assert counts(lambda: chain(y, *OPS)) == (0, 80)
        with pytest.raises(RecompilationError, match=r"aten\.tan\.default"):
            chain(y, *OPS, "tan")
    torch.testing.assert_close(chain(y, *OPS, "tan"), chain(y.cpu(), *OPS, "tan"))


def test_an_interruption_leaves_every_value_right(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(21).to("tpu")
    known(y, "sin", "cos")
    x = y
    for i in range(80):
        x = (torch.tanh(x) if i == 40 else torch.sin(x)) + 0.5
    compiled = METRICS.compiled
    interrupted: list[CompileEvent] = []

    def interrupt(event: CompileEvent) -> None:
        if not interrupted:
            interrupted.append(event)
            raise KeyboardInterrupt
        compiled(event)

    monkeypatch.setattr(METRICS, "compiled", interrupt)
    with pytest.raises(KeyboardInterrupt):
        x.cpu()
    want = y.cpu()
    for i in range(80):
        want = (torch.tanh(want) if i == 40 else torch.sin(want)) + 0.5
    torch.testing.assert_close(x.cpu(), want)


def test_an_error_of_one_piece_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(22).to("tpu")
    known(y, "sin", "cos")
    entry = REGISTRY.get("aten.tanh.default")
    assert entry is not None

    def fail(x: object) -> None:
        raise ValueError("broken")

    broken = type(entry)(
        *(fail if name == "fn" else getattr(entry, name) for name in entry.__slots__)
    )
    monkeypatch.setitem(REGISTRY._entries, "aten.tanh.default", broken)
    a = y
    for _ in range(40):
        a = torch.sin(a) + 0.5
    b = torch.tanh(a)
    c = torch.cos(b)
    d = torch.cos(a)
    with pytest.raises(RuntimeError, match=r"aten\.tanh\.default.*broken"):
        d.cpu()
    with pytest.raises(RuntimeError, match="broken"):
        c.cpu()
    want = y.cpu()
    for _ in range(40):
        want = torch.sin(want) + 0.5
    torch.testing.assert_close(d.cpu(), torch.cos(want))


def test_a_pipe_is_closed_by_the_thread_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threading.Event()
    raised: list[Exception] = []
    closed: list[bool] = []
    compile_ = workers.WorkerProcess.compile

    def compile_and_stop(self: workers.WorkerProcess, job: bytes) -> object:
        os.kill(self.pid, signal.SIGSTOP)  # it never answers
        sent.set()
        try:
            return compile_(self, job)
        except Exception as error:
            raised.append(error)
            time.sleep(0.2)  # for what `close` does meanwhile
            assert self._process.stdout
            closed.append(self._process.stdout.closed)
            raise

    monkeypatch.setattr(workers.WorkerProcess, "compile", compile_and_stop)
    pool = workers.Workers(1)
    pool.submit(lambda: CompileJob(None, b"", 0), lambda result: None)
    assert sent.wait(WAIT)
    (pid,) = pool.pids()
    pool.close()
    assert closed == [False]
    assert isinstance(raised[0], EOFError | OSError)
    assert not pool.pids() and not os.path.exists(f"/proc/{pid}")


SCRIPT = """
    import time, torch
    from tpu_core import modes
    from tpu_core.runtime import runtime
    from tpu_eager.fused import background

    def chain(y):
        for _ in range(100):
            y = torch.sin(y) + 0.5
        return y.cpu()

    y = torch.ones(8, device="tpu")
    with modes.using("strict"):
        chain(y)
    chain(y)
    chain(y)
    workers = runtime().builder.provider(background).workers
    while not workers.pids():
        time.sleep(0.01)
    print(workers.wait(0), *workers.pids())
"""


def test_the_interpreter_ends_with_compiles_under_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={
            **os.environ,
            "TPU_EAGER_MODE": "fused",
            "TPU_COMPILE": "background",
            "TPU_CACHE": "off",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    finished, pid = done.stdout.split()
    assert finished == "False"
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")

"""Forked children, and the interpreter's exit with work under way."""

from __future__ import annotations

import textwrap

import pytest

from interpreter import clean, run


def test_a_forked_child_that_uses_the_device_is_told_so():
    out = clean("""
        import multiprocessing, torch
        from tpu_core.errors import ForkedProcessError

        x = torch.ones(2, device="tpu") + 1
        pending = x * 2
        x.cpu()

        def child():
            assert torch.tpu._is_in_bad_fork() and not torch.tpu.is_initialized()
            assert torch.tpu.is_available()
            torch.manual_seed(0)
            w = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
            w(torch.ones(2)).sum().backward()
            optimizer.step()  # the CPU is the child's to use
            uses = {
                "factory": lambda: torch.ones(2, device="tpu"),
                "transfer": lambda: torch.ones(2).to("tpu"),
                "op": lambda: x + 1,
                "in place": lambda: x.add_(1),
                "read": lambda: x.cpu(),
                "item": lambda: x[0].item(),
                "pending": lambda: pending.tolist(),
                "print": lambda: repr(x),
                "copy": lambda: x.copy_(torch.ones(2)),
                "synchronize": lambda: torch.tpu.synchronize(),
            }
            for name, use in uses.items():
                try:
                    use()
                    print(name, "raised nothing", flush=True)
                except ForkedProcessError as error:
                    assert "[TPU1004]" in str(error)
            print("child", flush=True)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        print(process.exitcode, pending.tolist())
    """)
    assert out == "child\n0 [4.0, 4.0]\n"


def test_data_loader_workers():
    out = clean("""
        import torch
        from torch.utils.data import DataLoader, Dataset
        from tpu_core.errors import ForkedProcessError

        class Data(Dataset):
            device = "cpu"
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return torch.full((2,), float(i), device=self.device)

        torch.ones(2, device="tpu").sum().item()
        for pin in (False, True):  # workers that leave the device alone say nothing
            batches = DataLoader(Data(), batch_size=2, num_workers=2, pin_memory=pin)
            print([batch.to("tpu", non_blocking=True).sum().item() for batch in batches])
        data = Data()
        data.device = "tpu"
        try:
            list(DataLoader(data, num_workers=1))
        except ForkedProcessError as error:
            print("spawn" in str(error))
    """)
    assert out == "[2.0, 10.0]\n[2.0, 10.0]\nTrue\n"


def test_data_loader_workers_beside_threads_that_train():
    out = clean(
        """
        import gc, threading, torch
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                gc.collect()
                return torch.full((2,), float(i)) + torch.randn(2) * 0

        def train():
            model = torch.nn.Linear(8, 8).to("tpu")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            while not stop.is_set():
                optimizer.zero_grad()
                model(torch.randn(4, 8, device="tpu")).sum().backward()
                optimizer.step()
                steps.release()

        stop, steps = threading.Event(), threading.Semaphore(0)
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        steps.acquire()
        total = 0
        for epoch in range(12):
            for batch in DataLoader(Data(), batch_size=2, num_workers=2, timeout=60):
                total += batch.to("tpu").sum().item()
        stop.set()
        for thread in threads:
            thread.join()
        print(total)
    """,
        timeout=300,
        TPU_PERFORMANCE_WARNINGS="0",
    )
    assert out == f"{12 * 12.0}\n"


@pytest.mark.of_cpu(reason="other platforms have the devices that are there")
def test_variables_that_a_forked_child_sets_are_in_force():
    out = clean(
        """
        import os, torch
        import tpu_core.runtime  # hooks of forks are there

        child = os.fork()
        if child == 0:
            os.environ["TPU_EAGER_MODE"], os.environ["TPU_NUM_DEVICES"] = "strict", "3"
            from tpu_core.config import config
            print(torch.tpu.device_count(), config().eager_mode, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        os.environ["TPU_NUM_DEVICES"] = "2"
        print(torch.tpu.device_count())
    """
    )
    assert out == "3 strict\n2\n"


def test_a_fork_while_another_thread_starts_the_device():
    """A worker of a DataLoader seeds all generators, whatever the parent's threads have locked."""
    # Not `clean`: a package that registers hooks amid a fork says that it has missed the first one.
    result = run("""
        import multiprocessing, sys, threading, time, torch

        start = lambda: torch.ones(2, device="tpu").sum().item()
        thread = threading.Thread(target=start)
        thread.start()
        codes = []
        while (thread.is_alive() or not codes) and None not in codes:
            if "tpu_core.runtime" not in sys.modules:
                time.sleep(1e-4)
                continue
            process = multiprocessing.get_context("fork").Process(
                target=torch.manual_seed, args=(1,)
            )
            process.start()
            process.join(30)
            codes.append(process.exitcode)
            process.kill()
        print(set(codes))
    """)
    assert result.stdout == "{0}\n", result.stderr


def test_a_forked_child_leaves_the_lock_of_jax_garbage_alone():
    """XLA's threads hold it while they hand over references; the child would wait for ever."""
    out = clean("""
        import gc, multiprocessing, torch
        from jax._src.lib import _jax

        calls, collect = [], _jax.collect_garbage
        _jax.collect_garbage = lambda: calls.append(collect())
        torch.ones(2, device="tpu").sum().item()

        def child():
            before = len(calls)
            gc.collect()
            print(len(calls) - before, flush=True)

        child()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
    """)
    assert out == "2\n0\n"


def test_a_forked_child_collects_nothing_of_the_parent():
    out = clean("""
        import gc, multiprocessing, os, torch
        from tpu_core.gc_control import OF_PYTHON

        os.register_at_fork(after_in_child=gc.collect)  # called first, being registered first
        torch.ones(2, device="tpu").sum().item()
        parent = os.getpid()

        class Node:
            def __init__(self):
                self.node = self

            def __del__(self):
                print("collected in the parent:", os.getpid() == parent, flush=True)

        gc.disable()
        Node()
        process = multiprocessing.get_context("fork").Process(target=gc.collect)
        process.start()
        process.join()
        gc.collect()
        print(gc.get_freeze_count() > OF_PYTHON)
    """)
    assert out == "collected in the parent: True\nFalse\n"


def test_a_plain_fork_keeps_the_warning_of_jax():
    result = run("""
        import os, torch
        torch.ones(2, device="tpu").sum().item()
        if os.fork() == 0:
            os._exit(0)
        os.wait()
    """)
    assert result.returncode == 0
    assert "os.fork() was called" in result.stderr


WORK = {
    "work that is not run": """
        import threading
        from tpu_core.config import override
        from tpu_core.errors import OutOfMemoryError

        with override(memory_limit="1M"):
            try:
                failed = torch.ones(1000, 1000, device="tpu") * 2
                torch.tpu.synchronize()
            except OutOfMemoryError:
                pass  # and nobody reads what failed
        w = torch.ones(64, 64, device="tpu", requires_grad=True)
        thread = threading.Thread(target=lambda: (w @ w).sum().backward())
        thread.start()
        thread.join()
        y = [w.grad + i for i in range(5)]
        y.append(y)
        torch.cycle = y
    """,
    "a computation that runs": """
        x = torch.ones(1500, 1500, device="tpu")
        event = torch.tpu.Event(enable_timing=True)
        for _ in range(4):
            x = x @ x * 1e-3
        event.record()
    """,
}


@pytest.mark.parametrize("work", WORK)
def test_exit(work):
    code = f"import torch\n{textwrap.dedent(WORK[work])}\nprint('end')"
    assert clean(code) == "end\n"


def test_exit_in_strict_mode():
    work = WORK["a computation that runs"]
    code = f"import torch\n{textwrap.dedent(work)}\nprint('end')"
    assert clean(code, TPU_EAGER_MODE="strict") == "end\n"


def test_exit_by_an_exception_of_the_user():
    result = run("""
        import torch
        x = torch.ones(4, device="tpu") * 2
        raise ValueError("the user's")
    """)
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: the user's")


ENDS = {
    "by main": ("", 0),
    "by sys.exit": ("sys.exit(3)", 3),
    "by a handler": ("os.kill(os.getpid(), signal.SIGTERM)", 5),
    "by a signal": (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)",
        -15,
    ),
}


@pytest.mark.parametrize("device", ("tpu", "cpu"))
@pytest.mark.parametrize("end", ENDS)
def test_exit_while_daemon_threads_train(end, device):
    """Python ends threads that ask for the GIL then, and PyTorch's destructors do."""
    code = """
        import os, signal, sys, threading, time, torch

        def train():
            model = torch.nn.Linear(8, 8).to("DEVICE")
            optimizer = torch.optim.Adam(model.parameters())
            while True:
                optimizer.zero_grad()
                model(torch.ones(4, 8, device="DEVICE")).sum().backward()
                optimizer.step()
                steps.release()

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        steps = threading.Semaphore(0)
        for _ in range(3):
            threading.Thread(target=train, daemon=True).start()
        for _ in range(30):
            steps.acquire()
    """
    how, expected = ENDS[end]
    result = run(f"{textwrap.dedent(code.replace('DEVICE', device))}\n{how}\n", timeout=200)
    assert (result.returncode, result.stderr) == (expected, "")


@pytest.mark.parametrize("seconds", (0.02, 0.1, 0.2, 0.3))
def test_exit_while_daemon_threads_compile(seconds):
    """A thread that Python ends inside XLA would unwind frames that use the interpreter."""
    code = """
        import threading, time, torch

        def compile(k):
            for n in range(1, 1000):
                x = torch.ones(4 * n + k, device="tpu")
                ((x * 1.5).sin() @ x.cos()).item()
                compiled.release()

        compiled = threading.Semaphore(0)
        for k in range(3):
            threading.Thread(target=compile, args=(k,), daemon=True).start()
        for _ in range(4):
            compiled.acquire()
        time.sleep(SECONDS)
    """
    code = textwrap.dedent(code.replace("SECONDS", str(seconds)))
    result = run(code, timeout=200, TPU_PERFORMANCE_WARNINGS="0")
    assert (result.returncode, result.stderr) == (0, "")


def test_threads_compile_first_beside_an_audit_hook():
    """A hook in Python, as filelock has, lets another thread run wherever it is called."""
    clean("""
        import sys, threading, time, torch

        torch.ones(3, device="tpu")  # starts the device and compiles nothing

        def hook(event, arguments):
            if event == "object.__setattr__":
                time.sleep(0.002)

        def run(k):
            together.wait()
            for n in range(2):
                x = torch.ones(4 * n + k + 1, device="tpu")
                ((x * 1.5).sin() @ x.cos()).item()

        sys.addaudithook(hook)
        together = threading.Barrier(4)
        threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """)


def test_a_tensor_sent_to_another_process_is_refused():
    out = clean("""
        import concurrent.futures, multiprocessing, queue, torch
        import torch.multiprocessing as mp
        from tpu_core.errors import ProcessSharingError

        def shown(name, function):
            try:
                print(name, function())
            except ProcessSharingError as error:
                print(name, ".cpu()" in str(error), "float32[2, 3]" in str(error))

        x = torch.ones(2, 3, device="tpu")
        fork = multiprocessing.get_context("fork")
        reader, writer = mp.Pipe()
        shown("pipe", lambda: writer.send([x]))
        shown("simple queue", lambda: mp.SimpleQueue().put({"a": x}))
        shown("parameter", lambda: writer.send(torch.nn.Parameter(x)))
        shown("module", lambda: writer.send(torch.nn.Linear(3, 2, device="tpu")))
        for sent in (x, [1, {"a": x}], torch.nn.Linear(3, 2, bias=False, device="tpu")):
            q = mp.Queue()
            q.put(sent)  # its thread pickles
            q.put(2)
            shown("queue", lambda: q.get(timeout=30))
            shown("next", lambda: q.get(timeout=30))
        shown("view of a storage", lambda: writer.send(x.untyped_storage()))
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
            shown("pool", lambda: pool.submit(id, x).result(30))
            shown("pool", lambda: pool.submit(abs, -3).result(30))

        # On the CPU all goes as before.
        q.put((x.cpu(), torch.nn.Parameter(torch.zeros(1)), torch.ones(2).untyped_storage()))
        tensor, parameter, storage = q.get(timeout=30)
        print(tensor.sum().item(), tensor.is_shared(), type(parameter).__name__, len(storage))
    """)
    assert out.splitlines() == [
        "pipe True True",
        "simple queue True True",
        "parameter True True",
        "module True True",
        *["queue True True", "next 2"] * 3,
        "view of a storage True False",
        "pool True True",
        "pool 3",
        "6.0 True Parameter 8",
    ]


def test_tensors_of_data_loader_workers_are_refused():
    out = clean("""
        import torch
        from torch.utils.data import DataLoader, Dataset
        from tpu_core.errors import ProcessSharingError

        class Data(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return {"x": torch.full((2,), float(i), device="tpu")}

        # Workers that start the device themselves; pinning starts it in this process.
        for pin in (False, True):
            try:
                list(DataLoader(Data(), num_workers=1, pin_memory=pin, timeout=90))
            except ProcessSharingError as error:
                print("float32[1, 2]" in str(error), "Workers of a DataLoader" in str(error))
    """)
    assert out == "True True\n" * 2

"""Ctrl-C while the device or the compiler works, and SIGTERM at any time."""

from __future__ import annotations

import textwrap

import pytest

from interpreter import clean, run

INTERRUPT = """
    import os, signal, threading, time, torch
    from tpu_core import _C, modes

    # A shell starts what runs in its background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    modes.set_mode(modes.Mode("whole", max_ops=0))

    def interrupt_after(seconds):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
"""


@pytest.mark.of_cpu(reason="an accelerator has sorted before the signal comes")
def test_an_interrupt_ends_the_wait_for_the_device() -> None:
    work = """
        keep = torch.ones(3, device="tpu")
        x = torch.arange(2_000_000.0).to("tpu")  # which one core sorts
        torch.tpu.synchronize()
        for wait in (lambda: y[0].item(), lambda: y.cpu(), torch.tpu.synchronize):
            keep += 1
            y = x
            for _ in range(3):
                y = torch.sort(-y)[0]
            _C.flush()
            interrupt_after(0.1)
            try:
                wait()
                print("ended")
            except KeyboardInterrupt:
                print(_C.newest_array(0).is_ready())
            assert y[3].item() == 3 - 1_999_999
        print(keep.tolist())
    """
    out = clean(textwrap.dedent(INTERRUPT) + textwrap.dedent(work))
    assert out == "False\nFalse\nFalse\n[4.0, 4.0, 4.0]\n"


def test_an_interrupt_ends_the_wait_for_the_compiler() -> None:
    work = """
        import hashlib
        from tpu_core.pjrt import client as pjrt

        keep = torch.ones(3, device="tpu") * 3
        torch.tpu.synchronize()
        compile_module, began, ended = pjrt.compile_module, [], []

        def slow(*args):
            began.append(1)
            # As XLA does: one call, without the GIL.
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 8_000_000)
            ended.append(1)
            return compile_module(*args)

        pjrt.compile_module = slow
        keep += 1
        x = torch.full((41,), 0.5, device="tpu") + 1
        interrupt_after(0.1)
        try:
            x.sum().item()
        except KeyboardInterrupt:
            print(len(began), len(ended))
        print(keep.tolist(), x.sum().item())
        for thread in threading.enumerate():  # one may compile what the interrupt left behind
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        print(len(began) == len(ended))
    """
    code = textwrap.dedent(INTERRUPT) + textwrap.dedent(work)
    assert clean(code, TPU_CACHE="off") == "1 0\n[4.0, 4.0, 4.0] 61.5\nTrue\n"


def test_an_interrupt_ends_the_wait_for_another_thread() -> None:
    work = """
        import hashlib
        from tpu_core.pjrt import client as pjrt

        x = torch.full((43,), 0.5, device="tpu")
        torch.tpu.synchronize()
        compile_module, entered, ended = pjrt.compile_module, threading.Event(), []

        def slow(*args):
            entered.set()
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 8_000_000)
            ended.append(1)
            return compile_module(*args)

        pjrt.compile_module = slow
        made = []

        def other():
            made.append(x + 1)
            _C.flush()

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        interrupt_after(0.1)
        try:
            made[0].cpu()
        except KeyboardInterrupt:
            print(len(ended))
        thread.join()
        print(made[0].sum().item())
    """
    code = textwrap.dedent(INTERRUPT) + textwrap.dedent(work)
    assert clean(code, TPU_CACHE="off") == "0\n64.5\n"


def test_an_interrupt_while_a_first_op_imports_leaves_no_half_of_a_package() -> None:
    """sympy was imported in part, from then on by every op that checks its arguments in Python."""
    work = """
        import importlib.abc, sys

        class Interrupting(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name == "sympy.interactive" and not interrupts:
                    interrupts.append(name)
                    os.kill(os.getpid(), signal.SIGINT)

        interrupts = []
        sys.meta_path.insert(0, Interrupting())
        x = torch.ones(2, 2, device="tpu")
        try:
            x @ x
            print("ended")
        except KeyboardInterrupt:
            pass
        print((x @ x).tolist(), len(interrupts), torch.tpu.metrics()["fallbacks"])
    """
    out = clean(textwrap.dedent(INTERRUPT) + textwrap.dedent(work))
    assert out == "[[2.0, 2.0], [2.0, 2.0]] 1 0\n"


def test_an_interrupt_during_a_collection_is_not_lost() -> None:
    """What is raised in a callback of the collector that is written in Python is ignored."""
    out = clean(
        """
        import gc, torch

        torch.ones(2, device="tpu").sum().item()
        callbacks = [c for c in gc.callbacks if hasattr(c, "__code__")]
        print([c.__name__ for c in callbacks])
    """
    )
    assert out == "[]\n"


def test_the_end_by_a_signal_while_a_program_trains() -> None:
    code = """
        import os, signal, sys, threading, torch

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        model = torch.nn.Linear(32, 32).to("tpu")
        optimizer = torch.optim.Adam(model.parameters())
        for i in range(1_000_000):
            x = torch.ones(16 + i % 7, 32, device="tpu")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if i == 20:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    """
    result = run(code, TPU_COMPILE="background")
    assert (result.returncode, result.stderr) == (3, "")

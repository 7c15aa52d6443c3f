"""What a signal handler of the program raises is the program's, whatever it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, signal, time
    import torch

    class Late(Exception):
        pass

    def late(*_):
        raise Late("late")

    signal.signal(signal.SIGALRM, late)

    def stopped_once(module, name):
        function = getattr(module, name)

        def call(*args, **kwargs):
            setattr(module, name, function)
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(0.1)
            return function(*args, **kwargs)

        setattr(module, name, call)
"""
STOPPED = {
    "abstract evaluation": "jax, 'eval_shape'",
    "meta function": "tpu_core.recorder.signature, 'run_meta'",
    "compile": "tpu_core.compiler.context.pjrt, 'compile_module'",
}


def run(program: str) -> None:
    env = os.environ | {"TPU_CACHE": "off", "TPU_TIERS": "compiled"}
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", STOPPED)
def test_a_call_that_was_stopped_is_made_again(where: str) -> None:
    run(f"""
    import jax, tpu_core.compiler.context, tpu_core.recorder.signature
    torch.ones(2, device="tpu").tolist()
    x = torch.ones(3, 4, device="tpu")
    stopped_once({STOPPED[where]})
    found = []
    for _ in range(3):
        try:
            found.append(((x > 0).sin() + 1).tolist() == ((x.cpu() > 0).sin() + 1).tolist())
        except Late:
            found.append(None)
    assert found.count(None) == 1 and found.count(True) == 2, found
    assert torch.tpu.metrics()["fallbacks"] == 0
    """)


def test_gradients_outlive_a_time_limit() -> None:
    run("""
    import random
    chance = random.Random(0)
    w = torch.ones(8, 8, device="tpu", requires_grad=True)
    torch.relu(torch.ones(1, 8, device="tpu") @ w + 1).sum().backward()
    w.grad.tolist()
    stopped = 0
    for i in range(8):
        x = torch.ones(2 + i, 8).to("tpu")
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + chance.random() * 0.1)
            for _ in range(20):
                torch.relu(x @ w + 1).sum().backward()
                x.exp().softmax(0).tolist()
        except Late:
            stopped += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert stopped and w.grad.sum().item() > 0
    """)

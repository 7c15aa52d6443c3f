"""Which backend compiles what, and that importing torch imports nothing of Dynamo."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def printed(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dynamo_is_not_imported_with_torch() -> None:
    out = printed("""
        import sys, torch
        print([m for m in sys.modules if m.startswith("torch._dynamo") or m == "jax"])
    """)
    assert out == "[]\n"


def test_ours_is_the_default_and_registered() -> None:
    out = printed("""
        import torch
        # torch 2.11 has it as the default of an argument.
        named = getattr(torch.compiler, "get_default_backend", None)
        print(
            named() if named else torch.compile.__kwdefaults__["backend"],
            "tpu" in torch.compiler.list_backends(),
        )
        from torch._dynamo.device_interface import get_interface_for_device
        interface = get_interface_for_device("tpu")
        print(interface.__module__, interface.is_available(), interface.current_device())
    """)
    assert out == "tpu True\ntpu_compile.interface True 0\n"


def test_other_devices_go_to_inductor() -> None:
    out = printed("""
        import torch
        import torch._inductor.compile_fx as fx
        calls = []
        original = fx.compile_fx
        fx.compile_fx = lambda *a, **k: calls.append(1) or original(*a, **k)
        print(torch.compile(lambda x: x * 2)(torch.ones(2)).tolist(), len(calls))
        print(torch.compile(lambda x: x * 2)(torch.ones(2, device="tpu")).tolist(), len(calls))
    """)
    assert out == "[2.0, 2.0] 1\n[2.0, 2.0] 1\n"

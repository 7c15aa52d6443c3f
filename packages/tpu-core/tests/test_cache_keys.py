"""What the keys of the cache depend on, and what is remembered beside programs."""

from __future__ import annotations

import pytest

from interpreter import clean
from tpu_core.cache import ExecutableStore, SharedTier, TieredStore, fingerprint
from tpu_core.cache.tiers import remembered_names
from tpu_core.pjrt.host import instruction_set

X86 = "processor\t: 0\nflags\t\t: fpu avx2 sse\n\nprocessor\t: 1\nflags\t\t: fpu\n"


def test_the_instruction_set_is_that_of_the_first_cpu_in_any_order(tmp_path):
    def of(text):
        file = tmp_path / "cpuinfo"
        file.write_text(text)
        return instruction_set(file)

    assert of(X86) == of("flags\t\t: sse fpu avx2\n")
    assert of(X86) != of("flags\t\t: fpu\n")
    assert of("Features\t: neon\n") != of("Features\t: neon sve\n")
    assert instruction_set(tmp_path / "none") == instruction_set(tmp_path / "neither")


PROGRAM = """
import torch
print((torch.arange(4.0, device="tpu") * 2).sum().item(), torch.tpu.metrics()["compiles"] > 0)
"""


def test_other_compiler_flags_make_other_programs(tmp_path):
    folder = {"TPU_CACHE_DIR": str(tmp_path)}
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    assert clean(PROGRAM, **folder) == "12.0 True\n"
    assert clean(PROGRAM, **folder, **flags) == "12.0 True\n"
    assert clean(PROGRAM, **folder) == "12.0 False\n"


def test_what_was_compiled_for_one_device_runs_on_another():
    code = """
    import jax, numpy as np, torch
    from tpu_core.pjrt import client as pjrt
    client = pjrt.start()
    first, second = client.devices
    lowered = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((2,), np.float32))
    data = pjrt.serialize(pjrt.compile_module(pjrt.module_bytes(lowered), first, client))
    loaded = pjrt.load(
        pjrt.deserialize(data, second, client), [((2,), np.dtype(np.float32))], second
    )
    x = pjrt.put(np.ones(2, np.float32), second)
    (y,) = loaded.execute([x]).consume_with_handlers(loaded.handlers)
    print(y.device == second, y.tolist(), {client.device_key(i) for i in range(2)})
    """
    assert clean(code, TPU_NUM_DEVICES="2") == "True [2.0, 2.0] {None}\n"


@pytest.mark.parametrize("tiered", [False, True])
def test_names_are_computed_once_for_what_they_depend_on(tiered, tmp_path):
    disk = ExecutableStore(tmp_path / "cache", 1 << 20)
    store = TieredStore(disk, SharedTier("nosuch://not/asked", timeout=1)) if tiered else disk
    computed = []

    def compute():
        computed.append(1)
        return ["aten::add.Tensor"]

    for _ in range(2):
        assert remembered_names(store, compute, versions="1") == ["aten::add.Tensor"]
    assert len(computed) == 1
    assert remembered_names(store, compute, versions="2") == ["aten::add.Tensor"]
    assert remembered_names(None, compute, versions="1") == ["aten::add.Tensor"]
    assert len(computed) == 3


@pytest.mark.parametrize("payload", [b"\xff", b"{}", b"[1]", b"null"])
def test_names_that_are_none_are_computed_again(payload, tmp_path):
    store = ExecutableStore(tmp_path / "cache", 1 << 20)
    store.put(fingerprint(versions="1"), payload, {})
    for _ in range(2):
        assert remembered_names(store, lambda: ["a", "b"], versions="1") == ["a", "b"]
    assert store.get(fingerprint(versions="1")).payload == b'["a", "b"]'

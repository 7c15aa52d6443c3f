"""Programs that a process compiles for a TPU as well: what for, and under which key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tpu_core import config, modes
from tpu_core.compiler.context import BuildContext
from tpu_core.compiler.cross_compile import CrossCompiler, compiling, topology_compiler
from tpu_core.compiler.segment import Segment
from tpu_core.errors import ConfigurationError, NotPaddableError
from tpu_core.lowering.implementations import Target
from tpu_core.pjrt.chips import AbstractChip
from tpu_core.pjrt.client import version_of
from tpu_core.platforms import Platform
from tpu_core.runtime import runtime


class Compiler:
    """Takes programs and compiles nothing."""

    kind, device = "TPU v5e", 0

    def __init__(self, error: Exception | None = None) -> None:
        self.modules: list[bytes] = []
        self.error = error

    def compile(self, module: bytes) -> tuple[bytes, str]:
        if self.error is not None:
            raise self.error
        self.modules.append(module)
        return b"executable", "PJRT C API\nTFRT TPU v5 lite"


@pytest.fixture
def stored() -> dict[str, tuple[bytes, dict[str, Any]]]:
    return {}


@pytest.fixture
def cross(stored: Any) -> Any:
    def put(key: str, payload: bytes, manifest: dict[str, Any]) -> None:
        stored[key] = payload, manifest

    with modes.using("segments"), config.override(compile="blocking"):
        yield CrossCompiler("v5e:1x1", Compiler(), put)


def step(number: int) -> None:
    """Run a program that no other number has: it is part of the program, as a dim is."""
    a = torch.arange(24).reshape(2, 3, 4)
    x = a.to("tpu")
    for dim in f"{number:b}":
        a, x = a.cumsum(int(dim)).add(a), x.cumsum(int(dim)).add(x)
    assert x.tolist() == a.tolist()


def test_keys_are_those_of_a_process_on_the_chip(cross: CrossCompiler, stored: Any) -> None:
    context = runtime().builder.context
    segments: list[Segment] = []
    context.on_program.append(segments.append)
    try:
        with compiling(cross):
            step(19)
            torch.tpu.synchronize()
    finally:
        context.on_program.remove(segments.append)
    cross.wait()
    assert segments and not cross.failed
    platform = Platform("tpu", "a chip")
    version = version_of("tpu", "PJRT C API\nTFRT TPU v5 lite")
    there = BuildContext(replace(context.client, platform=platform, version=version), None)
    assert {there.exact_key(s) for s in segments} == set(stored) == set(cross.compiled)
    assert all(manifest["platform"] == version for _, manifest in stored.values())
    assert not any(context.exact_key(s) in stored for s in segments)


def test_programs_are_lowered_for_the_chip(cross: CrossCompiler, monkeypatch: Any) -> None:
    from tpu_core.compiler import context

    seen = []
    lower = context.segments.lower

    def lower_and_look(s: Segment) -> bytes:
        seen.append((Target.current().platform, Target.current().kind, AbstractChip.traced()))
        return lower(s)

    monkeypatch.setattr(context.segments, "lower", lower_and_look)
    with compiling(cross):
        step(21)
    cross.wait()
    assert ("tpu", "TPU v5e", AbstractChip("TPU v5e")) in seen
    own = Target.current().platform
    assert (own, None, None) in seen
    before = len(seen)
    step(22)
    assert {where for where, *_ in seen[before:]} == {own}


def test_what_fails_is_kept_and_the_program_goes_on(cross: CrossCompiler, stored: Any) -> None:
    error = RuntimeError("libtpu refused it")
    cross.compiler = Compiler(error)
    with compiling(cross):
        step(25)
    cross.wait()
    assert set(cross.failed) == {error} and not stored


def test_programs_that_no_platform_pads_are_no_failures(cross: CrossCompiler, stored: Any) -> None:
    def lower() -> bytes:
        raise NotPaddableError("its ops depend on a size")

    cross.note("key", {"segment": "padded"})
    cross.add("key", lower, {})
    cross.wait()
    assert not cross.failed and not stored


def test_no_package_that_compiles_for_topologies(monkeypatch: Any) -> None:
    monkeypatch.setattr("tpu_core.compiler.cross_compile.entry_points", lambda group: ())
    with pytest.raises(ConfigurationError, match="pip install tpu-compile"):
        topology_compiler("v5e:1x1")

"""A segment that cannot be run: what fails with it, and what stays."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from interpreter import clean
from tpu_core import modes
from tpu_core.errors import CompilationError, RecompilationError
from tpu_core.lowering.registry import REGISTRY

WHOLE = modes.Mode("whole", max_ops=0)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.sinc` has a lowering that fails."""

    def fail(self: object) -> None:
        raise ValueError("a defect")

    torch.tpu.init()  # loads the lowerings
    entry = REGISTRY.get("aten.sinc.default")
    assert entry is not None
    monkeypatch.setitem(REGISTRY._entries, entry.op, dataclasses.replace(entry, fn=fail))


@pytest.mark.usefixtures("broken")
def test_only_the_op_at_fault_and_what_depends_on_it_fail() -> None:
    with modes.using(WHOLE):
        weight = torch.ones(3, 29, device="tpu") * 2
        before = weight + 1
        bad = torch.sinc(before)
        worse = bad + weight
        after = before * 3
        after[0] = 7
        draws = torch.rand(4, device="tpu")
        with pytest.raises(
            CompilationError, match="aten.sinc.default failed: ValueError: a defect"
        ):
            after.cpu()
        assert after[1].tolist() == [9.0] * 29 and after[0].tolist() == [7.0] * 29
        assert weight.sum().item() == 2 * 3 * 29 and before.sum().item() == 3 * 3 * 29
        assert 0 <= draws.min().item() <= draws.max().item() < 1
        for value in (bad, worse):
            with pytest.raises(CompilationError, match="a defect"):
                value.cpu()


@pytest.mark.usefixtures("broken")
def test_several_ops_at_fault() -> None:
    with modes.using(WHOLE):
        x = torch.ones(31, device="tpu")
        first, y = torch.sinc(x), x + 1
        second, z = torch.sinc(y), y + 1
        with pytest.raises(CompilationError):
            torch.tpu.synchronize()
        assert z.tolist() == [3.0] * 31
        for value in (first, second):
            with pytest.raises(CompilationError):
                value.cpu()


def test_what_must_not_be_compiled_yet_is_kept() -> None:
    with modes.using(WHOLE):
        x = torch.full((37,), 2.0, device="tpu")
        torch.tpu.synchronize()
        with pytest.raises(RecompilationError), torch.tpu.no_recompile():
            y = x.expm1()
        assert y.sum().item() == pytest.approx(37 * 6.389056, rel=1e-5)


def test_an_interrupt_while_compiling_loses_nothing() -> None:
    out = clean(
        """
        import torch
        from tpu_core.compiler import segment as segments

        keep = torch.ones(3, device="tpu") * 3
        torch.tpu.synchronize()
        lower, calls = segments.lower, []

        def interrupted(segment):
            calls.append(segment)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return lower(segment)

        segments.lower = interrupted
        x = torch.full((41,), 0.5, device="tpu") + 1
        keep += 1
        try:
            x.sum().item()
        except KeyboardInterrupt:
            print("interrupted")
        print(keep.tolist(), x.sum().item())
    """,
        TPU_CACHE="off",
    )
    assert out == "interrupted\n[4.0, 4.0, 4.0] 61.5\n"

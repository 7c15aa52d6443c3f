"""Reasons of compiles: the argument that is new, or how known ops stand together anew."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tpu_core import modes
from tpu_core.compiler import reasons
from tpu_core.compiler.reasons import Reasons
from tpu_core.compiler.segment import Segment
from tpu_core.metrics import METRICS
from tpu_core.runtime import runtime

WHOLE = modes.Mode("whole", max_ops=0)  # segments end where the test ends them


def reason_of(work: Callable[[], object]) -> tuple[str, str]:
    """Reason and line of the one program that ``work`` needs."""
    before = len(METRICS.compile_events())
    result = work()
    torch.tpu.synchronize()
    del result
    (event,) = METRICS.compile_events()[before:]
    return event.reason, event.line or ""


def zeros(*shape: int) -> torch.Tensor:
    t = torch.zeros(shape).to("tpu")
    t.add_(0)  # on the device, as a whole value
    torch.tpu.synchronize()
    return t


def test_arguments_that_are_compiled_in_are_named():
    x = zeros(5, 6)
    with torch.tpu.set_eager_mode("strict"):
        x.logcumsumexp(0)
        reason, line = reason_of(lambda: x.logcumsumexp(1))
    assert reason == "aten.logcumsumexp.default: dim 0 -> 1"
    assert "test_reasons.py" in line


def test_layouts_and_lists():
    x, y = zeros(7, 7), zeros(4, 7)
    with torch.tpu.set_eager_mode("strict"):
        x.i0(), y.i0()
        reason, _ = reason_of(lambda: x.t().i0())
        assert reason == "aten.i0.default: self float32[7, 7] -> float32[7, 7] with strides [1, 7]"
        assert reason_of(lambda: y.t().i0())[0].endswith("] -> float32[7, 4]")
        torch.stack([x, x])
        reason, _ = reason_of(lambda: torch.stack([x, x, x]))
        assert "tensors 2 items -> 3 items" in reason


def test_one_number_for_all_tensors_of_a_list():
    x = zeros(3, 23)
    with torch.tpu.set_eager_mode("strict"):
        torch._foreach_mul([x, x], [2.5, 2.5])
        reason, _ = reason_of(lambda: torch._foreach_mul([x, x], [2.5, 3.5]))
    assert "scalars 2 equal numbers -> 2 items" in reason


def test_growing_storages_behind_a_window_of_one_size():
    x, longer = zeros(31, 5), zeros(32, 5)
    with torch.tpu.set_eager_mode("strict"):
        x[2:4].erfinv()
        reason, _ = reason_of(lambda: longer[2:4].erfinv())
    assert "with storage [31, 5] -> float32[2, 5] with storage [32, 5]" in reason


def test_known_ops_in_a_new_order():
    x = zeros(3, 29)
    with modes.using(WHOLE):
        reason_of(lambda: x.sin().cos().tan().exp())
        reason, _ = reason_of(lambda: x.sin().cos().exp())
        assert reason.startswith("known ops in a new order (3 ops, cut at: synchronize): op 3 is ")
        assert reason.endswith("aten.exp.default, where an earlier program had aten.tan.default")
        reason, _ = reason_of(lambda: x.sin().cos().tan())
        assert reason.endswith("ends after 3 of the 4 ops of an earlier program")
        reason, _ = reason_of(lambda: x.sin().cos().tan().exp().sin())
        assert reason.endswith("op 5 is aten.sin.default, where an earlier program ended")
        reason, _ = reason_of(lambda: x.cos().tan().exp())
        assert reason.endswith("the last 3 as in an earlier program")


def test_results_that_are_read_later():
    x = zeros(3, 37)
    kept = []

    def work(keep: bool) -> torch.Tensor:
        y = x.sinh()
        if keep:
            kept.append(y)
        return y.cosh()

    with modes.using(WHOLE):
        reason_of(lambda: work(keep=False))
        reason, line = reason_of(lambda: work(keep=True))
    assert reason == (
        "same ops as before, but the result of aten.sinh.default is read later, which it was not "
        "before"
    )
    assert line.endswith(f"in {work.__name__}")


def test_a_program_of_another_thread_while_a_reason_is_looked_for(monkeypatch):
    segments: list[Segment] = []
    programs = runtime().builder.context.on_program
    x = zeros(3, 41)
    programs.append(segments.append)
    try:
        with modes.using(WHOLE):
            reason_of(lambda: x.asinh().acosh())
            reason_of(lambda: x.acosh().asinh())
    finally:
        programs.remove(segments.append)
    known, new = segments
    compared, common = Reasons(), reasons._common
    compared.remember(known)

    def meanwhile(*forms):
        compared.remember(known)
        thread = threading.Thread(target=compared.explain, args=(known,))
        thread.start()
        thread.join()
        return common(*forms)

    monkeypatch.setattr(reasons, "_common", meanwhile)
    assert compared.explain(new).text.startswith("known ops in a new order (2 ops")

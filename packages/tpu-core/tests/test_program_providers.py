"""Program providers of a mode: the order in which they are asked, and what they hear of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tpu_core import modes
from tpu_core.compiler.context import BuildContext
from tpu_core.compiler.programs import Program
from tpu_core.compiler.providers import ProgramProvider, ProgramRequest
from tpu_core.compiler.reasons import Reason
from tpu_core.compiler.segment import Segment
from tpu_core.metrics import METRICS
from tpu_core.runtime import initialize

Log = list[tuple[str, str, int]]


class Logged(ProgramProvider):
    """Writes down what it is asked, and gives the next of its answers."""

    def __init__(self, name: str, log: Log, answers: list[Any] | None = None) -> None:
        self.name, self.log, self.answers = name, log, answers or []
        self.requests: list[ProgramRequest] = []

    def provide(self, request: ProgramRequest) -> Any:
        self.log.append((self.name, "provide", len(request.segment.nodes)))
        self.requests.append(request)
        return self.answers.pop(0) if self.answers else None

    def comment(self, segment: Segment, reason: Reason) -> Reason:
        return Reason(f"{reason.text}; {self.name}", reason.line)

    def note_exact(self, segment: Segment, program: Program) -> None:
        self.log.append((self.name, "exact", program.ops))

    def due(self, segment_key: str) -> bool:
        self.log.append((self.name, "due", 0))
        return False


def factory(provider: ProgramProvider) -> Callable[[BuildContext], ProgramProvider]:
    return lambda context: provider


@pytest.fixture
def log() -> Iterator[Log]:
    yield []


def test_providers_are_asked_in_order_and_hear_of_what_is_compiled(log: Log) -> None:
    first, second = Logged("first", log), Logged("second", log)
    mode = modes.Mode("both", max_ops=0, providers=(factory(first), factory(second)))
    x = torch.randn(3, 11).to("tpu")
    with modes.using(mode):
        found = (x.sin() * 2).cpu()
        assert log == [
            ("first", "provide", 2),
            ("second", "provide", 2),
            ("first", "exact", 2),
            ("second", "exact", 2),
        ]
        assert METRICS.compile_events()[-1].reason.endswith("; first; second")
        again = (x.sin() * 2).cpu()  # in memory: nothing is asked
    assert len(log) == 4
    torch.testing.assert_close(found, x.cpu().sin() * 2)
    assert torch.equal(again, found)


def test_parts_end_the_round_and_ops_run_without_a_policy(log: Log) -> None:
    # Parts, then op by op; what is not due is not asked about again.
    first = Logged("first", log, [[(0, 1, True), (1, 3, False)], None, []])
    second = Logged("second", log)
    mode = modes.Mode("parts", max_ops=0, providers=(factory(first), factory(second)))
    x = torch.randn(2, 13).to("tpu")
    expected = (x.cpu().sin() * 2).exp()

    def run() -> None:
        torch.testing.assert_close((x.sin() * 2).exp().cpu(), expected)

    with modes.using(mode):
        run()
        # The part for CPU kernels is tpu-core's own to serve, the other is a segment of two ops.
        assert log[:3] == [
            ("first", "provide", 3),
            ("first", "provide", 2),
            ("second", "provide", 2),
        ]
        log.clear()
        before = METRICS.snapshot()
        run()
        assert METRICS.delta(before)["pieces"] == 3
        assert log == [("first", "provide", 3)]
        run()
        assert log == [("first", "provide", 3), ("first", "due", 0)]


def test_missing_ops_are_listed_during_the_request_alone(log: Log) -> None:
    listed: list[int] = []

    class Asking(Logged):
        def provide(self, request: ProgramRequest) -> Any:
            assert request.missing is not None
            listed.append(len(request.missing()))
            return super().provide(request)

    asking = Asking("asking", log)
    mode = modes.Mode("asking", max_ops=0, providers=(factory(asking),))
    x = torch.randn(5, 17).to("tpu")
    with modes.using("strict"):
        x.tan().cpu()
    with modes.using(mode):
        x.tan().tan().cosh().cpu()
    assert listed == [1]  # `tan` has a program
    missing = asking.requests[0].missing
    assert missing is not None
    with pytest.raises(RuntimeError, match="request for a program is over"):
        missing()


def test_a_client_has_one_provider_of_a_factory(log: Log) -> None:
    made = []

    def make(context: BuildContext) -> ProgramProvider:
        made.append(context)
        return Logged("made", log)

    x = torch.randn(7, 19).to("tpu")
    for name in ("a", "b"):
        with modes.using(modes.Mode(name, max_ops=0, providers=(make,))):
            (x.sinh() if name == "a" else x.cosh()).cpu()
    assert made == [initialize().builder.context]
    assert [kind for _, kind, _ in log] == ["provide", "exact"] * 2

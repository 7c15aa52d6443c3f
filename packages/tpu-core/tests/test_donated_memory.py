"""Which output takes the memory of an input that nothing else holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tpu_core import modes
from tpu_core.compiler import segment as segments
from tpu_core.compiler.aliases import aliases

WHOLE = modes.Mode("whole", max_ops=0)
Step = Callable[..., tuple[torch.Tensor, ...]]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[segments.Segment]:
    """The segments that are lowered during the test."""
    found: list[segments.Segment] = []
    lower = segments.lower

    def spy(segment: segments.Segment) -> bytes:
        found.append(segment)
        return lower(segment)

    monkeypatch.setattr(segments, "lower", spy)
    return found


def check(step: Step, *inputs: torch.Tensor) -> None:
    """Run ``step`` as one program on copies of ``inputs``, and on the CPU."""
    ours = [x.to("tpu") for x in inputs]
    torch.tpu.synchronize()
    with modes.using(WHOLE):
        ours = [*step(*ours), *ours]
        torch.tpu.synchronize()
    theirs = [x.clone() for x in inputs]
    for a, b in zip(ours, [*step(*theirs), *theirs], strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_an_updated_weight_stays_where_it_is(lowered: list[segments.Segment]) -> None:
    def step(weight: torch.Tensor, momentum: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = weight.sin()  # comes first, and has the weight's shape
        momentum.mul_(0.9).add_(gradient)
        weight.sub_(momentum, alpha=0.1)
        return (gradient,)

    check(step, torch.randn(37, 5), torch.randn(37, 5))
    (segment,) = lowered
    weight, momentum = segment.inputs()
    by_slot = {segment.inputs()[i]: segment.live[o] for i, o in aliases(segment).items()}
    made = [node.outputs for node in segment.nodes]
    assert by_slot == {weight: made[-1][0], momentum: made[2][0]}


def test_a_storage_written_in_parts_keeps_its_memory(lowered: list[segments.Segment]) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        x[3].add_(1)
        x[:, 2] = 0
        return (y,)

    check(step, torch.randn(11, 7))
    (segment,) = lowered
    assert aliases(segment) == {0: segment.live.index(segment.nodes[-1].outputs[0])}


def test_lists_are_paired_tensor_by_tensor(lowered: list[segments.Segment]) -> None:
    def step(*parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = tuple(p.cos() for p in parameters)
        torch._foreach_sub_(parameters, gradients)
        return gradients

    check(step, *(torch.randn(9, 4) for _ in range(3)))
    (segment,) = lowered
    updated = segment.nodes[-1].outputs
    assert [segment.live[aliases(segment)[i]] for i in range(3)] == updated


def test_other_memory_serves_any_output_of_its_shape(lowered: list[segments.Segment]) -> None:
    with modes.using(WHOLE):
        x = torch.arange(13.0).to("tpu")
        torch.tpu.synchronize()
        x = x * 2 + 1
        torch.tpu.synchronize()
    assert aliases(lowered[-1]) == {0: 0}
    assert x.tolist() == [2 * i + 1 for i in range(13)]

"""Sizes of which too little is known for a program run by CPU kernels, where ops vary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing import assert_close

from compile_counts import compiles
from tpu_core import modes
from tpu_core.config import override
from tpu_core.errors import RecompilationError
from tpu_core.metrics import METRICS
from tpu_core.runtime import initialize
from tpu_eager.bucketing import new_sizes
from tpu_eager.fused import bucketed

pytestmark = pytest.mark.filterwarnings("ignore::tpu_core.errors.HostSyncWarning")


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    policy = initialize().builder.provider(bucketed)
    monkeypatch.setattr(policy, "_small", NoSmallReads())  # these segments end in reads
    monkeypatch.setattr(policy.limit, "_lines", OrderedDict())
    with modes.using("fused"), override(recompile_limit=8):
        yield


class NoSmallReads:
    def by_cpu_kernels(self, *_: object) -> bool:
        return False


# Sizes of three inputs, related by chance in the first two and in the second and third.
SIZES = ((4, 5, 7), (5, 6, 9), (6, 7, 3), (9, 2, 11), (7, 12, 5), (11, 3, 2), (3, 9, 6))


Op = Callable[[torch.Tensor], torch.Tensor]


def branched(op: Op, branch: int, sizes: tuple[int, int, int], device: str) -> torch.Tensor:
    """Ops on three inputs of independent sizes, a few of them others in each branch.

    Args:
        op: Another one in each test, whose programs another test does not have.
        branch: Number of ops that the first input has before.
        sizes: Of the inputs.
        device: The device.
    """
    a, b, c = (torch.arange(n * 4.0).view(n, 4).cos().to(device) for n in sizes)
    w = torch.arange(16.0).view(4, 4).div(8).sin().to(device)
    for _ in range(branch):
        a = a.mul(0.5).tanh()
    rows = op(torch.cat([x @ w for x in (a, b, c)]))
    scores = (rows @ rows.T).softmax(-1).sub(0.01).clamp(min=0).sqrt()
    mean = (scores @ rows).sigmoid().square().mean(0)
    return (mean * a.exp().sum() - b.amax() + c.cumsum(0)[-1].add(1).log1p()).cpu()


def host_parts() -> int:
    return int(METRICS.snapshot()["host_parts"])


def test_sizes_related_by_chance_have_no_program() -> None:
    def step(branch: int, i: int) -> None:
        got = branched(torch.relu, branch, SIZES[i], "tpu")
        assert_close(got, branched(torch.relu, branch, SIZES[i], "cpu"))

    assert compiles(lambda branch: step(branch, 0), [0, 1]) == 2
    before = host_parts()
    assert compiles(lambda i: step(2, i), [0, 1]) == 0
    assert host_parts() == before + 2
    assert compiles(lambda i: step(2, i), [*range(2, 7), *range(7)]) == 1


def test_a_form_that_is_never_known_has_a_program_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(branch: int, i: int = 0) -> None:
        branched(torch.sin, branch, SIZES[i], "tpu")

    compiles(step, [0, 1])
    families = initialize().builder.provider(bucketed)._families
    monkeypatch.setattr(families, "learn", lambda s: True)
    before = host_parts()
    assert compiles(lambda i: step(2, i), range(new_sizes._RUNS)) == 0
    assert compiles(lambda i: step(2, i), [5]) == 1
    assert host_parts() == before + new_sizes._RUNS


@pytest.mark.parametrize(
    ("op", "settings"), [(torch.cos, {"recompile_limit": 0}), (torch.exp, {"fallback": "error"})]
)
def test_settings_without_cpu_kernels(op: Op, settings: dict[str, object]) -> None:
    with override(**settings):
        before = host_parts()
        assert compiles(lambda branch: branched(op, branch, SIZES[0], "tpu"), range(4)) == 4
        assert host_parts() == before


def test_a_program_that_must_not_be_compiled_is_refused() -> None:
    compiles(lambda branch: branched(torch.sinh, branch, SIZES[0], "tpu"), [0, 1])
    with pytest.raises(RecompilationError), torch.tpu.no_recompile():
        branched(torch.sinh, 2, SIZES[0], "tpu")


def test_what_takes_long_is_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_sizes, "host_seconds", lambda s: 60.0)
    before = host_parts()
    assert compiles(lambda branch: branched(torch.tanh, branch, SIZES[0], "tpu"), range(4)) == 4
    assert host_parts() == before

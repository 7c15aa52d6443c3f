"""Few ops on few elements before a read run by CPU kernels until they have come often."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from compile_counts import compiles
from tpu_core import modes
from tpu_core.config import override
from tpu_core.metrics import METRICS
from tpu_core.runtime import initialize
from tpu_eager.bucketing import small_reads
from tpu_eager.fused import bucketed

pytestmark = pytest.mark.filterwarnings("ignore::tpu_core.errors.HostSyncWarning")


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    initialize().builder.provider(bucketed)._small = small_reads.SmallReads()
    with modes.using("fused"), override(recompile_limit=8):
        yield


def search(device: str, seed: int) -> list[float]:
    """A walk that takes another way after each number that it reads."""
    draw = random.Random(seed)
    x = torch.linspace(-1, 1, 24).to(device).requires_grad_()
    state, w = torch.zeros(24, device=device), torch.eye(24, device=device)
    found = []
    for _ in range(6):
        kind = draw.randrange(5)
        if kind == 0:
            loss = (w @ x).square().sum() * draw.random()
        elif kind == 1:
            loss = (x - state).abs().mean()
        elif kind == 2:
            loss = x[draw.randrange(2, 20) :].logsumexp(0) + state.dot(x)
        elif kind == 3:
            loss = torch.where(x > 0, x, -x).topk(draw.randrange(1, 5)).values.sum()
        else:
            loss = x.cumsum(0).square().mean() - x[3]
        (grad,) = torch.autograd.grad(loss, x)
        found.append(loss.item())
        if grad.norm() > 0.5:
            state[::2].add_(grad[::2], alpha=0.1)
        else:
            state.mul_(0.5)
        found += state[:3].tolist()
    return found


def test_ways_through_a_search_are_no_programs() -> None:
    def step(seed: int) -> None:
        assert_close(search("tpu", seed), search("cpu", seed), rtol=1e-5, atol=1e-6)

    before = METRICS.snapshot()
    assert compiles(step, range(20)) == 0
    assert METRICS.delta(before)["host_parts"] >= 100


def tiny(n: int) -> Callable[[int], None]:
    x = torch.arange(float(n)).to("tpu")

    def step(i: int) -> None:
        assert ((x + i).sum() * 0.5).item() == sum(range(n)) / 2 + i * n / 2

    return step


def test_what_comes_often_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny(8)
    monkeypatch.setattr(small_reads, "OPS", 5 * (3 + small_reads.HOST_RUN))
    assert compiles(step, [3] * 5) == 0
    assert compiles(step, [3] * 2) == 1
    before = METRICS.snapshot()
    assert compiles(step, [3] * 9) == 0
    assert METRICS.delta(before)["host_parts"] == 0


def test_many_elements_and_other_ends_are_programs() -> None:
    assert compiles(tiny(small_reads.SMALL), range(1)) == 1
    x = torch.ones(8, device="tpu")

    def unread(_: int) -> None:
        x.mul_(1.0).add_(1.0)
        torch.tpu.synchronize()

    assert compiles(unread, range(1)) == 1


@pytest.mark.parametrize(
    "settings, op", [({"recompile_limit": 0}, torch.cos), ({"fallback": "error"}, torch.sinh)]
)
def test_without_cpu_kernels_they_are_programs(
    settings: dict[str, object], op: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.ones(8, device="tpu")
    with override(**settings):
        assert compiles(lambda _: op(x).sum().item(), range(1)) == 1


def test_an_index_out_of_range_is_refused() -> None:
    x = torch.arange(5.0, device="tpu")
    with pytest.raises(IndexError):
        x[torch.tensor([7]).to("tpu")].item()
    assert x[torch.tensor([3]).to("tpu")].item() == 3


def test_random_numbers_are_the_devices() -> None:
    def draws() -> list[float]:
        torch.manual_seed(3)
        return [torch.rand(4, device="tpu").sum().item() for _ in range(3)]

    got = draws()
    with override(recompile_limit=0):
        assert got == draws()


def test_attention_whose_mask_has_a_gradient() -> None:
    """The CPU's kernel of one op gives a mask no gradient."""

    def gradients(device: str, is_causal: bool, wanted: tuple[int, ...]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = [(2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4), (5, 6)]
        values = [torch.randn(s).to(device) for s in shapes[: 3 if is_causal else 4]]
        inputs = [x.requires_grad_(i in wanted) for i, x in enumerate(values)]
        y = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        y.square().sum().backward()
        total = y.sum().item()
        return [torch.tensor(total), *(x.grad.cpu() for x in inputs if x.grad is not None)]

    before = METRICS.snapshot()
    for case in ((False, (0, 1, 2)), (False, (0, 3)), (False, (3,)), (True, (0, 1, 2))):
        assert_close(gradients("tpu", *case), gradients("cpu", *case), rtol=1e-4, atol=1e-5)
    assert METRICS.delta(before)["host_parts"] >= 2

"""Random numbers are the same in each tier: of the seed, the offset and an element's index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu_core import _C, tiers

pytestmark = pytest.mark.usefixtures("fusion_emitters")

D = "tpu"
EXACT: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(7, 5, device=D),
    "rand float16": lambda: torch.rand(300, device=D, dtype=torch.float16),
    "rand bfloat16": lambda: torch.rand(300, device=D, dtype=torch.bfloat16),
    "rand float64": lambda: torch.rand(300, device=D, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 10, (200,), device=D),
    "randint from": lambda: torch.randint(-5, 1_000_003, (200,), device=D),
    "randint wide": lambda: torch.empty(64, dtype=torch.int64, device=D).random_(5, 2**40),
    "randint uint8": lambda: torch.randint(0, 16, (50,), device=D, dtype=torch.uint8),
    "random": lambda: torch.empty(20, device=D, dtype=torch.int32).random_(),
    "random int64": lambda: torch.empty(20, device=D, dtype=torch.int64).random_(),
    "bernoulli": lambda: torch.bernoulli(torch.linspace(0, 1, 60).reshape(6, 10).to(D)),
    "bernoulli of p": lambda: torch.empty(400, device=D).bernoulli_(0.3),
    "bernoulli of integers": lambda: torch.empty(400, device=D, dtype=torch.int32).bernoulli_(0.3),
    "bernoulli of booleans": lambda: torch.empty(400, device=D, dtype=torch.bool).bernoulli_(0.3),
    "bernoulli of a tensor": lambda: torch.empty(90, 6, device=D).bernoulli_(
        torch.linspace(0, 1, 6).to(D)
    ),
    "bernoulli transposed": lambda: (
        torch.empty(6, 90, device=D, dtype=torch.int64)
        .t()
        .bernoulli_(torch.linspace(0, 1, 6, dtype=torch.float64).to(D))
    ),
    "rand complex": lambda: torch.rand(60, 3, device=D, dtype=torch.complex64),
    "uniform complex": lambda: torch.empty(6, 3, device=D, dtype=torch.complex128).uniform_(2, 3),
    "random of floats": lambda: torch.empty(60, device=D).random_(),
    "random of bfloat16": lambda: torch.empty(60, device=D, dtype=torch.bfloat16).random_(-9, 200),
    "random of booleans": lambda: torch.empty(60, device=D, dtype=torch.bool).random_(),
    "random of a range": lambda: torch.empty(60, device=D, dtype=torch.float64).random_(7, None),
    "randint of floats": lambda: torch.randint(-4, 9, (60,), device=D, dtype=torch.float16),
    "rrelu": lambda: F.rrelu(torch.linspace(-1, 1, 60).reshape(6, 10).to(D), training=True),
    "rrelu of a view": lambda: F.rrelu(
        torch.linspace(-1, 1, 60).reshape(6, 10).to(D).t(), 0, 1, True
    ),
    "rrelu of bfloat16": lambda: F.rrelu(torch.linspace(-1, 1, 60).bfloat16().to(D), training=True),
    "rrelu in place": lambda: F.rrelu_(torch.linspace(-1, 1, 60).to(D).clone(), training=True),
    "randint like": lambda: torch.randint_like(torch.ones(60, device=D), 9),
    "randint like of a view": lambda: torch.randint_like(torch.ones(6, 10, device=D).t(), -9, 9),
    "randint like of int64": lambda: torch.randint_like(
        torch.ones(60, device=D), 2**40, dtype=torch.int64
    ),
    "dropout": lambda: F.dropout(torch.ones(6, 10, device=D), 0.4),
    "dropout transposed": lambda: F.dropout(torch.ones(6, 10, device=D).t(), 0.4),
    "multinomial": lambda: torch.multinomial(torch.linspace(0.1, 1, 60).reshape(6, 10).to(D), 3),
    "multinomial again": lambda: torch.multinomial(
        torch.arange(1.0, 61).reshape(6, 10).to(D), 300, replacement=True
    ),
    "randperm": lambda: torch.randperm(40, device=D),
    "randperm int32": lambda: torch.randperm(300, device=D, dtype=torch.int32),
    "geometric": lambda: torch.empty(300, device=D).geometric_(0.2),
    "poisson": lambda: torch.poisson(torch.linspace(0, 40, 600).to(D)),
    "poisson float64": lambda: torch.poisson(torch.linspace(0, 40, 60, dtype=torch.float64).to(D)),
    "binomial": lambda: torch.binomial(
        torch.arange(0.0, 300).to(D), torch.linspace(0, 1, 300).to(D)
    ),
}
# Logarithms and products of a kernel and of a program differ in their last bits.
CLOSE: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(3000, device=D),
    "randn float64": lambda: torch.randn(300, device=D, dtype=torch.float64),
    "randn bfloat16": lambda: torch.randn(300, device=D, dtype=torch.bfloat16),
    "randn complex": lambda: torch.randn(60, 5, device=D, dtype=torch.complex64),
    "normal complex": lambda: torch.empty(60, device=D, dtype=torch.complex128).normal_(3, 2),
    "exponential": lambda: torch.empty(300, device=D).exponential_(2.0),
    "uniform": lambda: torch.empty(5, 6, device=D).t().uniform_(-3, 2),
    "normal of means": lambda: torch.normal(torch.ones(40, device=D), 2.0),
    "normal of deviations": lambda: torch.normal(1.5, torch.linspace(0, 2, 40).to(D)),
    "normal of both": lambda: torch.normal(
        torch.linspace(-1, 1, 6).view(2, 3).t().to(D), torch.linspace(0, 2, 8).view(4, 1, 2).to(D)
    ),
    "normal of float64": lambda: torch.normal(torch.ones(9, device=D, dtype=torch.float64), 0.5),
    "cauchy": lambda: torch.empty(300, device=D).cauchy_(1, 2),
    "log-normal": lambda: torch.empty(300, device=D).log_normal_(0.5, 0.3),
    "gamma": lambda: torch._standard_gamma(torch.linspace(0.05, 9, 500).to(D)),
    "gamma float64": lambda: torch._standard_gamma(torch.linspace(0.1, 9, 50).double().to(D)),
    "gamma bfloat16": lambda: torch._standard_gamma(torch.linspace(0.1, 9, 50).bfloat16().to(D)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.linspace(0.2, 9, 60).view(6, 10).to(D)),
    "a layer": lambda: nn.Linear(3, 4, device=D).weight.detach(),
}


def drawn(draw: Callable[[], torch.Tensor], tier: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.zeros(1, device=D)
    _C.flush()
    _C.set_tiers(tiers.NUMBERS[tier])
    try:
        torch.manual_seed(5)
        draws = [draw().cpu() for _ in range(2)]
        return draws, torch.tpu.get_rng_state()
    finally:
        _C.flush()
        _C.set_tiers(tiers.NUMBERS["compiled"])


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_tiers_draw_the_same(name: str) -> None:
    draw = EXACT.get(name) or CLOSE[name]
    (of_host, state), (of_programs, expected_state) = (
        drawn(draw, tier) for tier in ("host", "compiled")
    )
    assert torch.equal(state, expected_state)
    assert not torch.equal(*of_host)  # the generator moves on
    for ours, theirs in zip(of_host, of_programs):
        if name in EXACT:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_sizes_of_draws_compile_nothing(host: None) -> None:
    before = torch.tpu.metrics()["compiles"]
    for n in range(2, 10):
        torch.rand(n, 3, device=D).add(torch.randn(n, 3, device=D)).cpu()
        nn.Linear(n, n + 1, device=D)
    assert torch.tpu.metrics()["compiles"] == before


def test_sizes_of_normal_distributions_compile_nothing(host: None) -> None:
    before = torch.tpu.metrics()["compiles"]
    for n in range(2, 10):
        torch.distributions.Normal(torch.zeros(n, 3, device=D), torch.ones(3, device=D)).sample()
    assert torch.tpu.metrics()["compiles"] == before
    with pytest.raises(RuntimeError, match="normal expects all elements of std >= 0.0"):
        torch.normal(torch.zeros(2, device=D), torch.tensor([1.0, -1.0], device=D)).cpu()


def test_sizes_of_distributions_compile_nothing(host: None) -> None:
    from torch import distributions as dist

    before = torch.tpu.metrics()["compiles"]
    for n in range(2, 8):
        ones = torch.ones(n, 3, device=D)
        for made in (
            dist.Beta(ones, ones),
            dist.Dirichlet(ones),
            dist.Poisson(ones * 4),
            dist.Binomial(5, ones / 2),
            dist.Cauchy(ones, ones),
            dist.Geometric(ones / 4),
            dist.LogNormal(ones, ones),
            dist.Categorical(ones),
        ):
            made.sample().cpu()
        torch.randperm(n, device=D).cpu()
        torch.multinomial(ones, 9, replacement=True).cpu()
    assert torch.tpu.metrics()["compiles"] == before
    with pytest.raises(RuntimeError, match="invalid Poisson rate"):
        torch.poisson(torch.tensor([1.0, -1.0], device=D)).cpu()
    with pytest.raises(RuntimeError, match="encountering probability entry < 0"):
        torch.multinomial(torch.tensor([1.0, -1.0], device=D), 4, replacement=True).cpu()

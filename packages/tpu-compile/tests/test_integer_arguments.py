"""Integer arguments that no shape follows from: numbers of the call, one program for all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tpu_core.metrics import METRICS


def at_position(x: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    return x * table[n : n + x.shape[0]].cos()


def written(x: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    table = table.clone()
    table[n : n + x.shape[0]] += x
    seen = torch.arange(table.shape[0], device=x.device) < n + x.shape[0]
    return (x @ table.T).masked_fill(~seen, -1e9).softmax(-1) @ table


def indexed(x: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    return x * table[n] + table[n % 5].softmax(-1)


def averaged(x: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    return (x * n + table[: x.shape[0]]) / (n + 1)


def shifted(x: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    return x + F.embedding(torch.arange(n, n + x.shape[0], device=x.device), table)


@pytest.mark.parametrize("function", [at_position, written, indexed, averaged, shifted])
def test_numbers_are_given_to_the_program(function: Callable[..., torch.Tensor]) -> None:
    """Positions, indices and divisors are no sizes: another one is no other program."""
    compiled = torch.compile(function, backend="tpu", dynamic=True)
    compiles = []
    for n in (3, 9, 2, 30, 14, 41):
        before = METRICS.snapshot()
        given = torch.randn(5, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
        ours = [t.detach().to("tpu").requires_grad_() for t in given]
        found, expected = compiled(*ours, n), function(*given, n)
        torch.testing.assert_close(found.cpu(), expected)
        gradients = torch.autograd.grad(found.square().sum(), ours)
        wanted = torch.autograd.grad(expected.square().sum(), given)
        # Sums of products in another order than the CPU's.
        torch.testing.assert_close([g.cpu() for g in gradients], list(wanted), rtol=1e-4, atol=1e-4)
        compiles.append(METRICS.delta(before)["compiles"])
    assert compiles[0] > 0
    assert compiles[2:] == [0] * 4


def decayed(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * (1 / n) + x.sin() * 0.9**n


def warmed_up(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x * min(1.0, n / 10)).tanh() * max(n, 4)


def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.square() * n**2 / math.sqrt(n) + 100 // n


def moments(x: torch.Tensor, n: int) -> torch.Tensor:
    return x / (1 - 0.9**n) - (x * (n - 12)).cos() * x.shape[0] / n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [decayed, warmed_up, scaled, moments])
def test_numbers_that_the_host_computes(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    compiled = torch.compile(function, backend="tpu", dynamic=True)
    compiles = []
    for n in (3, 9, 2, 30, 14, 41, 7):
        before = METRICS.snapshot()
        x = torch.randn(5, 4, dtype=dtype, requires_grad=True)
        ours = x.detach().to("tpu").requires_grad_()
        found, expected = compiled(ours, n), function(x, n)
        # XLA's tanh and powers have another last bit than the CPU's, and squares double it.
        near = {"rtol": 1e-5 if dtype == torch.float32 else 1e-12, "atol": 1e-5}
        torch.testing.assert_close(found.cpu(), expected, **near)
        (gradient,) = torch.autograd.grad(found.square().sum(), ours)
        (wanted,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(gradient.cpu(), wanted, **near)
        compiles.append(METRICS.delta(before)["compiles"])
    # The second value that is no constant of the program, such as one after a 1.0, may compile.
    assert compiles[4:] == [0] * 3


def test_sums_of_more_than_64_bits_raise() -> None:
    compiled = torch.compile(lambda x, n: x + (n + n), backend="tpu", dynamic=True)
    x = torch.ones(3, dtype=torch.int64, device="tpu")
    for n in (5, 7, 2**61):
        assert compiled(x, n).tolist() == [1 + 2 * n] * 3
    with pytest.raises(OverflowError):
        compiled(x, 2**62).cpu()


def test_gradients_in_batches_have_the_numbers() -> None:
    compiled = torch.compile(lambda x, n: (x * (1 / n)).sin() * (n % 5), dynamic=True)
    for n in (3, 8, 6):
        x = torch.randn(4)
        ours = x.to("tpu").requires_grad_()
        (found,) = torch.autograd.grad(
            compiled(ours, n), ours, torch.eye(4, device="tpu"), is_grads_batched=True
        )
        torch.testing.assert_close(found.cpu(), torch.diag((x / n).cos() / n * (n % 5)))


def test_numbers_and_sizes_vary_together() -> None:
    compiled = torch.compile(written, backend="tpu", dynamic=True)
    before = METRICS.snapshot()
    for n, rows in ((3, 5), (9, 7), (2, 12), (30, 6), (14, 9), (11, 15), (20, 10), (5, 8)):
        x, table = torch.randn(rows, 4), torch.randn(50, 4)
        found = compiled(x.to("tpu"), table.to("tpu"), n)
        torch.testing.assert_close(found.cpu(), written(x, table, n))
    assert METRICS.delta(before)["compiles"] <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_numbers_of_any_size_and_sign(dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x, n: x * n + n, backend="tpu", dynamic=True)
    x = torch.arange(-2, 3).to(dtype)
    for n in (5, 7, -3, 0, 1, 2**40, -(2**40), 2**62):
        torch.testing.assert_close(compiled(x.to("tpu"), n).cpu(), x * n + n, rtol=1e-6, atol=0)


def test_backward_is_given_a_truth() -> None:
    compiled = torch.compile(lambda x, n: x * (n > 6), backend="tpu", dynamic=True)
    for n in (5, 9, 7, 2):
        x = torch.randn(3, device="tpu", requires_grad=True)
        compiled(x, n).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [float(n > 6)] * 3


def test_branches_have_integers_as_sizes() -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x[: n % 3 + 1].sum() * n, lambda x: x.sum(), (x,))

    compiled = torch.compile(function, backend="tpu", dynamic=True)
    for n in (2, 4, 5, 7):
        for sign in (1, -1):
            x = torch.rand(5) * sign
            torch.testing.assert_close(compiled(x.to("tpu"), n).cpu(), function(x, n))


def test_a_division_by_zero_raises() -> None:
    compiled = torch.compile(lambda x, n: x * (100 // (n - 5)), backend="tpu", dynamic=True)
    x = torch.randn(3)
    for n in (7, 9, 12):
        torch.testing.assert_close(compiled(x.to("tpu"), n).cpu(), x * (100 // (n - 5)))
    with pytest.raises(Exception, match="(?i)zero|zoo|guard"):
        compiled(x.to("tpu"), 5).cpu()


def test_a_window_at_the_end_is_shorter() -> None:
    compiled = torch.compile(lambda x, n: x[n : n + 4].cumsum(0), backend="tpu", dynamic=True)
    x = torch.randn(12)
    for n in (2, 5, 8, 9, 10, 11, 14, 3):
        torch.testing.assert_close(compiled(x.to("tpu"), n).cpu(), x[n : n + 4].cumsum(0))

"""Graphs with sizes that vary: few programs, results and gradients of the CPU, no matter what
stands in the padding.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tpu_compile.graph_op import GRAPHS
from tpu_compile.torch_compat import HAS_DEFAULT_BACKEND
from tpu_core import config
from tpu_core.errors import RecompileLimitWarning
from tpu_core.metrics import METRICS
from tpu_core.padding import segment_signature

pytestmark = pytest.mark.usefixtures("poison")


class Counted:
    """What was compiled and run since."""

    def __init__(self) -> None:
        self._before = METRICS.snapshot()
        self._events = len(METRICS.compile_events())

    def __getitem__(self, name: str) -> int:
        return int(METRICS.delta(self._before)[name])

    @property
    def reasons(self) -> list[str]:
        return [e.reason for e in METRICS.compile_events()[self._events :]]


Inputs = list[torch.Tensor]


def weighted(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a loss that gives each element of its result a gradient of its own."""

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = f(*xs)
        weights = torch.arange(out.numel(), device=out.device).view(out.shape) % 5 + 1.0
        return out.detach(), (out.float() * weights).sum()

    return run


def compare(
    f: Callable[..., Any],
    inputs: Sequence[Inputs],
    marked: dict[int, dict[str, int]] | None = None,
    **options: Any,
) -> Counted:
    """Run a compiled function on each of the inputs; results and gradients are those of the CPU.

    Args:
        f: A function or module.
        inputs: Arguments of each call.
        marked: Dims of the arguments to mark as dynamic, with what `mark_dynamic` takes.
        options: Of `torch.compile`.
    """
    own = copy.deepcopy(f).to("tpu") if isinstance(f, nn.Module) else f
    compiled = torch.compile(weighted(own), fullgraph=True, **options)
    counted = Counted()
    for xs in inputs:
        here = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
        there = [x.to("tpu").requires_grad_(x.is_floating_point()) for x in xs]
        for x in there:
            for dim, bounds in (marked or {}).items():
                torch._dynamo.mark_dynamic(x, dim, **bounds)
        found = []
        for run, given in ((weighted(f), here), (compiled, there)):
            out, loss = run(*given)
            loss.backward()
            found.append([out, *(x.grad for x in given if x.grad is not None)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-4)
    return counted


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Sums, means and a softmax over the dim that varies, and its size as a number."""
    y = torch.softmax(x, 0) * x.shape[0] + x.mean(0) - x.std(0)
    return torch.cat([y, x[:1]]).cumsum(0)[1:]


def rows(*sizes: int) -> list[Inputs]:
    return [[torch.randn(n, 4)] for n in sizes]


def test_a_marked_dim_is_padded_from_the_first_call() -> None:
    counted = compare(mixed, rows(5, 7, 6, 8), marked={0: {"min": 2, "max": 64}})
    assert counted["compiles"] <= 2, counted.reasons
    assert counted["padded_executions"] >= 4


def test_the_largest_bucket_is_the_marked_maximum() -> None:
    counted = compare(mixed, rows(20, 33, 35, 40), marked={0: {"min": 2, "max": 40}})
    buckets = " ".join(counted.reasons)
    assert "20 in 32" in buckets
    assert "33 in 40" in buckets
    assert "in 64" not in buckets


def test_buckets_are_configured() -> None:
    with config.override(buckets=(10, 50)):
        counted = compare(mixed, rows(7, 9, 11, 48, 51), marked={0: {}})
    buckets = " ".join(counted.reasons)
    assert "7 in 10" in buckets
    assert "11 in 50" in buckets
    assert "51 in 64" in buckets  # past the last, they grow by themselves


def test_the_second_size_makes_a_dim_dynamic() -> None:
    counted = compare(mixed, rows(5, 7, 6, 8, 5, 7))
    assert counted["padded_executions"] >= 4
    assert compare(mixed, rows(5, 7, 6, 8))["compiles"] == 0


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(1)


def test_several_dims_vary() -> None:
    sizes = ((2, 5), (3, 7), (4, 6), (3, 8), (2, 7))
    inputs = [[torch.randn(b, 2, n, 4), torch.randn(b, 2, n, 4)] for b, n in sizes]
    counted = compare(attention, inputs, marked={0: {}, 2: {}})
    assert counted["compiles"] <= 2, counted.reasons
    assert counted["padded_executions"] == len(sizes)


def test_any_dim_may_vary() -> None:
    # What never varies is not padded: the first size is compiled as it is.
    counted = compare(mixed, rows(5, 7, 6, 8), dynamic=True)
    assert counted["compiles"] <= 2, counted.reasons
    assert counted["padded_executions"] == 3


def test_a_window_of_a_longer_tensor() -> None:
    f = torch.compile(lambda x: x.cumsum(1) * x.shape[1], fullgraph=True)
    x = torch.randn(3, 40)
    there = x.to("tpu")
    counted = Counted()
    for n in (7, 5, 8, 3, 6):
        part = there[:, :n]
        torch._dynamo.mark_dynamic(part, 1, min=2, max=39)
        torch.testing.assert_close(f(part).cpu(), x[:, :n].cumsum(1) * n, rtol=1e-4, atol=1e-4)
    assert counted["compiles"] <= 2, counted.reasons


def test_a_size_that_must_be_even() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (2, x.shape[0] // 2)).softmax(1)

    counted = compare(halves, rows(6, 10, 8, 12), dynamic=True)
    assert counted["compiles"] <= 3, counted.reasons


def test_images() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 2, 1)
    )
    inputs = [[torch.randn(2, 2, n, 6)] for n in (10, 12, 14, 16)]
    counted = compare(model, inputs, marked={2: {}})
    assert counted["compiles"] <= 3, counted.reasons


RESIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bilinear": lambda x: F.interpolate(x, size=(9, 7), mode="bilinear").sin(),
    "corners aligned": lambda x: F.interpolate(x, (9, 7), mode="bilinear", align_corners=True) * 2,
    "averages": lambda x: F.adaptive_avg_pool2d(x, (4, 3)).sin(),
    "maxima": lambda x: F.adaptive_max_pool2d(x, (4, 3)).sin(),
    "padded": lambda x: F.pad(x, (0, 40 - x.shape[3], 0, 40 - x.shape[2])).cumsum(3),
}


@pytest.mark.parametrize("name", RESIZED)
def test_resizes_to_one_size(name: str) -> None:
    sizes = ((16, 20), (17, 19), (22, 18), (19, 27), (20, 24), (18, 21))
    counted = compare(RESIZED[name], [[torch.randn(2, 3, *n)] for n in sizes], dynamic=True)
    assert counted["compiles"] <= 5, counted.reasons
    assert counted["padded_executions"] >= 3


def test_graphs_that_are_gone_count_as_programs() -> None:
    """Beyond the limit of recompilations, whose programs' graphs `torch._dynamo.reset` dropped."""
    # Of one line, which has the limit.
    spectra = [lambda x: torch.fft.rfft(x).abs() * 2, lambda x: torch.fft.rfft(x).abs() * 3]
    for spectrum in spectra:
        torch._dynamo.reset()
        compiled = torch.compile(spectrum, dynamic=True)
        gc.collect()
        with config.override(recompile_limit=4), warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompileLimitWarning)
            for n in range(5, 11):
                x = torch.randn(n)
                torch.testing.assert_close(compiled(x.to("tpu")).cpu(), spectrum(x))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def test_a_training_step_of_any_size_is_one_program() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    device = copy.deepcopy(host).to("tpu")
    steps = []
    for model, compiled in ((host, False), (device, True)):
        run = functools.partial(loss_of, model)
        run = torch.compile(run, fullgraph=True) if compiled else run
        steps.append((run, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    counted = Counted()
    for n in (20, 17, 30, 19, 31, 32):
        x, y = torch.randn(n, 4), torch.randint(3, (n,))
        for (loss, optimizer), on in zip(steps, ("cpu", "tpu"), strict=True):
            data = [t.to(on) for t in (x, y)]
            for t in data:
                torch._dynamo.mark_dynamic(t, 0, min=2, max=64)
            optimizer.zero_grad()
            loss(*data).backward()
            optimizer.step()
    torch.tpu.synchronize()
    assert counted["compiles"] <= 2, counted.reasons  # momentum starts at the second step
    assert counted["executions"] == 6
    for want, got in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_keys_know_neither_sizes_nor_names() -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(0) * x.shape[0]

    def second(values: torch.Tensor) -> torch.Tensor:
        return values.exp().sum(0) * values.shape[0]

    keys = []
    for f, n in ((first, 5), (second, 9)):
        torch.tpu.synchronize()
        GRAPHS.clear()
        torch.compile(f, dynamic=True)(torch.ones(n, 4, device="tpu"))
        keys.append(list(GRAPHS))
    assert keys[0] == keys[1]
    assert len(keys[0]) == 1


PROGRAM = """
import sys
import torch
torch.compile(lambda a: a * 2, dynamic=True, backend="eager")(torch.ones(int(sys.argv[1]), 3))
f = torch.compile(lambda x: torch.softmax(x, 0).cumsum(0) * x.shape[0], fullgraph=True)
for n in map(int, sys.argv[1:]):
    x = torch.ones(n, 4).to("tpu")
    torch._dynamo.mark_dynamic(x, 0)
    f(x).cpu()
print(int(torch.tpu.metrics()["compiles"]))
"""


def test_another_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TPU_CACHE_DIR": str(tmp_path)}
    counts = []
    for sizes in ("5 20 9", "21 11 6 31"):
        command = [sys.executable, "-c", PROGRAM, *sizes.split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout))
    # For 5 and for 20; what serves 20 serves 9, too.
    assert counts == [2, 0]


def test_counts_of_elements_share_programs() -> None:
    f = torch.compile(lambda x: torch.tanh(x[x > 0] * 2).sum(), fullgraph=True)
    counted = Counted()
    for n in range(17, 32):
        x = torch.cat([torch.rand(n) + 0.1, -torch.ones(40 - n)])
        torch.testing.assert_close(f(x.to("tpu")).cpu(), torch.tanh(x[x > 0] * 2).sum())
    # What is positive, the first count as it is, and a bucket; the first sizes may be special.
    assert counted["compiles"] <= 5, counted.reasons


@pytest.mark.parametrize("capture", [False, True])
def test_a_number_becomes_a_size(capture: bool) -> None:
    def repeated(x: torch.Tensor) -> torch.Tensor:
        n = int(x.abs().sum().item())
        torch._check(n <= 16)
        return torch.ones(n, device=x.device) * x.mean()

    with torch._dynamo.config.patch(capture_scalar_outputs=capture):
        f = torch.compile(repeated, fullgraph=capture)
        for x in (torch.ones(5), torch.ones(7), -torch.ones(5)):
            torch.testing.assert_close(f(x.to("tpu")).cpu(), repeated(x))


def test_a_branch_on_a_value_names_line_and_rewrite() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line to be named
            return x * 2
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(f, fullgraph=True)(torch.ones(3, device="tpu"))
    parts = ["test_dynamic.py", "# the line to be named", "torch.cond"]
    if HAS_DEFAULT_BACKEND:  # torch 2.11 proposes `torch.cond` alone
        parts.append("torch.where")
    for part in parts:
        assert part in str(raised.value)


def test_a_guard_may_divide_by_a_difference_of_sizes() -> None:
    """``einsum`` of a convolution of unknown width guards on a remainder by ``width - 2``."""

    def program(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, weight, stride=(2, 1), padding=(0, 2), dilation=(2, 1))
        return torch.einsum("abcd,dcz->bza", y, table)

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 7, 4), (2, 1, 3, 3), (6, 2, 3)]
    x, weight, table = (torch.randn(s, generator=generator) for s in shapes)
    compiled = torch.compile(program, dynamic=True)
    found = compiled(x.to("tpu"), weight.to("tpu"), table.to("tpu"))
    torch.testing.assert_close(found.cpu(), program(x, weight, table))


def test_label_smoothing_over_classes_that_vary() -> None:
    """Forward gives backward the smoothing divided by the number of classes."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, label_smoothing=0.1)

    compiled = torch.compile(loss, dynamic=True)
    for tokens, classes in ((4, 5), (6, 9), (3, 12)):
        x, y = torch.randn(tokens, classes), torch.randint(classes, (tokens,))
        found = []
        for function, device in ((loss, "cpu"), (compiled, "tpu")):
            given = x.detach().to(device).requires_grad_()
            function(given, y.to(device)).backward()
            assert given.grad is not None
            found.append(given.grad.cpu())
        torch.testing.assert_close(found[1], found[0])


def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[0], device=x.device)[:, None] * 0.1
    return (F.gelu(x @ weight).cumsum(0) / x.shape[0] + places).logsumexp(0) * (x.shape[0] - 1)


def test_a_graph_is_traced_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = segment_signature.trace
    monkeypatch.setattr(
        segment_signature, "trace", lambda *args: (traced.append(1), trace(*args))[1]
    )
    compiled = torch.compile(weighed, backend="tpu", dynamic=True)
    weight = torch.randn(4, 3)
    counts = []
    for n in (12, 17, 24, 19, 30, 23, 16, 31, 20, 40, 2, 3):
        traced.clear()
        x = torch.randn(n, 4, requires_grad=True)
        ours = x.detach().to("tpu").requires_grad_()
        found, expected = compiled(ours, weight.to("tpu")), weighed(x, weight)
        (gradient,) = torch.autograd.grad(found.sum(), ours)
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(gradient.cpu(), torch.autograd.grad(expected.sum(), x)[0])
        counts.append(len(traced))
    assert sum(counts[:2]) > 0
    assert counts[2:] == [0] * 10


def joined(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scores = torch.cat([x, y]) @ weight
    return (scores * scores.softmax(-1)).sum(0)


def test_backward_of_a_concatenation_compiles_by_buckets() -> None:
    """It is given the two lengths and has tensors of their sum alone."""
    compiled = torch.compile(joined, backend="tpu", dynamic=True)
    weight = torch.randn(4, 3)
    ours = weight.to("tpu").requires_grad_()
    theirs = weight.clone().requires_grad_()
    compiles = []
    for n, m in ((5, 3), (19, 20), (18, 24), (30, 17), (17, 29), (28, 21), (23, 26), (25, 31)):
        before = METRICS.snapshot()
        x, y = torch.randn(n, 4), torch.randn(m, 4)
        found = compiled(x.to("tpu"), y.to("tpu"), ours).square().sum()
        expected = joined(x, y, theirs).square().sum()
        torch.testing.assert_close(found.cpu(), expected)  # read first: backward is a program
        gradients = torch.autograd.grad(found, ours) + torch.autograd.grad(expected, theirs)
        torch.testing.assert_close(gradients[0].cpu(), gradients[1], rtol=1e-4, atol=1e-3)
        compiles.append(METRICS.delta(before)["compiles"])
    assert compiles[4:] == [0] * 4, compiles

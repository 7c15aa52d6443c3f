"""Programs whose ops differ in each step compile a bounded number of programs."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from compile_counts import compiles
from tpu_core import modes
from tpu_core.config import override
from tpu_core.errors import RecompileLimitWarning
from tpu_core.metrics import METRICS
from tpu_core.padding import fourier
from tpu_core.runtime import initialize
from tpu_eager.bucketing import host_runs, new_sizes, policy, recompile_limit, small_reads
from tpu_eager.bucketing.line_programs import LinePrograms
from tpu_eager.fused import bucketed

LIMIT = 4  # so that tests are short


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(small_reads, "OPS", 0)  # the segments here end in reads, and are small
    with modes.using("fused"), override(recompile_limit=LIMIT):
        yield


def finish(x: torch.Tensor) -> torch.Tensor:
    """The line at which the segments of several tests end."""
    return F.softmax(x, dim=1).log().sum(0)


def spectra(seed: int) -> Callable[[int], None]:
    """The spectrum of another length each time, multiplied: its FFT is not padded."""
    draw, weight = random.Random(seed), torch.randn(4, 3)

    def step(size: int) -> None:
        x = torch.randn(2, 99)
        n = size or draw.randrange(9, 99)

        def of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return finish(torch.fft.rfft(x[:, :n]).abs()[:, :4] @ weight)

        torch.testing.assert_close(of(x.to("tpu"), weight.to("tpu")).cpu(), of(x, weight))

    return step


@pytest.fixture(autouse=True)
def no_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the lines of one test have compiled is nothing to another."""
    provider = initialize().builder.provider(bucketed)
    monkeypatch.setattr(provider.limit, "_lines", OrderedDict())
    monkeypatch.setattr(provider, "_parts", host_runs.HostRuns())
    # Sizes that are new to their form have programs at once: the limit is reached in few steps.
    monkeypatch.setattr(new_sizes, "_LEAST_OPS", sys.maxsize)


@pytest.fixture(autouse=True)
def no_transforms_on_padded_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """FFTs stand for what padded arrays do not serve, as those of long signals are."""
    monkeypatch.setattr(fourier, "_MOST", 0)


def test_what_cannot_be_padded_runs_by_cpu_kernels():
    step = spectra(1)
    with pytest.warns(RecompileLimitWarning) as caught:
        compiles(step, [0] * (2 * LIMIT))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "aten._fft_r2c.default" in text and "TPU_RECOMPILE_LIMIT=0" in text
    assert caught[0].filename == __file__
    before = METRICS.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiles(step, [0] * 10) == 0
    assert METRICS.delta(before)["host_parts"] >= 7  # a few are those of programs
    assert any("of" in (line or "") for line in METRICS.host_parts())
    assert "by CPU kernels" in str(torch.tpu.compile_report())


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_a_size_that_stays_is_compiled_beyond_the_limit():
    step = spectra(2)
    compiles(step, [0] * (2 * LIMIT))
    assert compiles(step, [29] * recompile_limit._IN_A_ROW) == 1
    before = METRICS.snapshot()
    assert compiles(step, [29]) == 0
    assert METRICS.delta(before)["host_parts"] == 0


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_a_new_phase_of_many_sizes_is_padded():
    spectrum, draw = spectra(3), random.Random(3)
    compiles(spectrum, [0] * (2 * LIMIT))

    def step(_: int) -> None:
        x = torch.randn(draw.randrange(9, 60), 5)
        torch.testing.assert_close(finish(x.to("tpu").cumsum(0)).cpu(), finish(x.cumsum(0)))

    compiles(step, range(recompile_limit._OF_A_FORM + 8))
    before = METRICS.snapshot()
    assert compiles(step, range(10)) <= 1
    assert METRICS.delta(before)["host_parts"] == 0


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_packed_sequences_of_other_lengths_are_no_new_programs():
    draw = torch.Generator().manual_seed(0)
    module = torch.nn.GRU(3, 4)
    on_device = copy.deepcopy(module).to("tpu")

    def step(_: int) -> None:
        lengths = torch.randint(9, 17, (12,), generator=draw).sort(descending=True).values
        x = torch.randn(12, 16, 3, generator=draw)
        found = []
        for m in (module, on_device):
            m.zero_grad()
            rows = x.to(m.weight_ih_l0.device)
            packed = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True)
            y, last = m(packed)
            (y.data.square().sum() + last.sum()).backward()
            found.append([y.data.cpu(), last.cpu(), *(p.grad.cpu() for p in m.parameters())])
        torch.testing.assert_close(*reversed(found), rtol=1e-4, atol=1e-5)

    compiles(step, range(20))
    assert compiles(step, range(20)) == 0


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_a_much_longer_loop_is_not_compiled_at_its_first_time():
    def step(length: int) -> None:
        x = torch.randn(3, 6)

        def of(x: torch.Tensor) -> torch.Tensor:
            for _ in range(length):
                x = (x * 1.5).tanh() - x.mean(0)
            return finish(x)

        torch.testing.assert_close(of(x.to("tpu")).cpu(), of(x))

    assert LIMIT > recompile_limit._FEW
    assert compiles(step, range(2, 2 + recompile_limit._FEW)) == recompile_limit._FEW
    before = METRICS.snapshot()
    compiles(step, [40])
    assert METRICS.delta(before)["host_parts"] >= 1
    assert compiles(step, [5]) == 1  # a short one is


def test_buckets_of_sizes_count_as_few_programs():
    line = LinePrograms()
    line.forms.update({"padded": 5, "exact": 5})
    line.padded.add("padded")
    assert line.count() == 5 + 2


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
@pytest.mark.parametrize("settings", [{"recompile_limit": 0}, {"fallback": "error"}])
def test_without_the_limit_each_step_is_compiled(settings):
    step = spectra(len(str(settings)))
    with override(**settings):
        assert compiles(step, [0] * (3 * LIMIT)) >= 2 * LIMIT


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_modes_of_the_user_are_not_those_of_the_kernels():
    step, draw = spectra(5), random.Random(5)

    def pieces(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        rows = [x[torch.arange(n, device=x.device)] for n in counts]  # with words of checks
        return torch.cat(rows).clamp(min=0.5).cumsum(0).sum(0)

    compiles(step, [0] * (2 * LIMIT))
    for _ in range(4 * LIMIT):
        x, counts = torch.rand(9, 3), [draw.randrange(2, 8) for _ in range(draw.randrange(1, 6))]
        with torch.device("tpu"), torch.inference_mode(), torch.autocast("cpu"):
            got = pieces(x.to("tpu"), counts)
        torch.testing.assert_close(got.cpu(), pieces(x, counts))


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_an_index_out_of_range_is_still_refused():
    draw = random.Random(2)

    def pieces(x: torch.Tensor, count: int, last: int) -> torch.Tensor:
        rows = [x[torch.randint(9, (draw.randrange(2, 8),)).to(x.device)] for _ in range(count)]
        rows.append(x[torch.tensor([last]).to(x.device)])
        return (torch.cat(rows) @ torch.ones(4, 2, device=x.device)).sum(0)

    x = torch.ones(9, 4, device="tpu")
    for _ in range(4 * LIMIT):
        pieces(x, draw.randrange(1, 6), 3).cpu()
    with pytest.raises(IndexError):
        pieces(x, 3, 11).cpu()
    pieces(x, 3, 3).cpu()  # said once


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_words_of_any_number_of_checked_ops_are_combined_by_no_program():
    step = spectra(6)
    indices = torch.randint(9, (16, 5)).to("tpu")

    def pieces(x: torch.Tensor, count: int) -> torch.Tensor:
        total = x[indices[0].to(x.device)]
        for n in range(1, count):
            total = total * 0.5 + x[indices[n].to(x.device)]
        return finish(total)

    def run(count: int) -> None:
        x = torch.rand(9, 3)
        torch.testing.assert_close(pieces(x.to("tpu"), count).cpu(), pieces(x, count))

    compiles(step, [0] * (2 * LIMIT))
    compiles(run, [9, 10, 11, 12, 13])
    before = METRICS.snapshot()
    assert compiles(run, [14, 15, 16, 4, 7]) == 0
    assert METRICS.delta(before)["host_parts"] >= 5
    indices[3] = 9  # of the fourth of seven ops, each with a word of its own
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        pieces(torch.rand(9, 3, device="tpu"), 7).cpu()
    indices[3] = 8
    run(7)  # said once


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_what_lies_between_ops_that_differ_is_one_program(monkeypatch):
    """A network on images that are turned in other ways, and its results turned in others."""
    monkeypatch.setattr(policy, "compile_seconds", lambda nodes: 0.0)  # each part at once
    draw = random.Random(7)
    layers = [torch.randn(3, 3, 3, 3) for _ in range(6)]
    ways = [(k, dims) for k in (1, 2, 3) for dims in ((-2, -1), (-1, -2), (-1, 0))]

    def work(device: str, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        x = x.to(device).rot90(*ways[first]).contiguous()
        for layer in layers:
            x = torch.tanh(F.conv2d(x, layer.to(device), padding=1)) + 0.1
        return finish(x.mean(1).rot90(ways[last][0], (-2, -1)).sum(-1))

    def run(way: int) -> None:
        x = torch.randn(8, 3, 8, 8)
        last = draw.randrange(len(ways))
        want = work("cpu", x, way, last)
        torch.testing.assert_close(work("tpu", x, way, last).cpu(), want, rtol=1e-4, atol=1e-5)

    compiles(run, range(LIMIT + 1))
    before = METRICS.snapshot()
    left = range(LIMIT + 1, len(ways))
    assert compiles(run, left) == 0
    delta = METRICS.delta(before)
    assert delta["host_parts"] > 0
    # Each convolution would be a program of its own, and what is between them another.
    assert delta["executions"] <= 4 * len(left)


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_a_longer_loop_at_another_line_is_beyond_the_limit():
    """Of the same ops, three times as many: most of them are in no earlier program."""
    weight = torch.randn(4, 4) * 0.2

    def loop(device: str, n: int) -> torch.Tensor:
        x, w = torch.ones(3, 4).to(device), weight.to(device)
        y = x
        for _ in range(n):
            y = torch.tanh(y @ w) + x
        return y

    def short(n: int) -> None:
        got = loop("tpu", n).exp().cpu()
        torch.testing.assert_close(got, loop("cpu", n).exp())

    def long(n: int) -> None:
        got = loop("tpu", n).exp().cpu()
        torch.testing.assert_close(got, loop("cpu", n).exp())

    compiles(short, range(8, 8 + LIMIT + 2))
    assert compiles(long, [60, 71, 66]) == 0


@pytest.mark.filterwarnings("ignore::tpu_core.errors.RecompileLimitWarning")
def test_transforms_and_norms_of_complex_numbers_run_by_cpu_kernels():
    """What is no program on padded arrays runs by a CPU kernel, and it alone."""
    weights = [torch.randn(3, 1) for _ in range(20)]

    def work(device: str, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        for w in weights:
            x = torch.tanh(x * w.to(device))
        f = torch.fft.rfft(x)
        norms = torch.stack(torch._foreach_norm([f, f * 2]))
        y = torch.fft.irfft(f, n=x.size(1))
        for w in weights:
            y = torch.tanh(y * w.to(device)) + norms[0]
        return y

    def run(n: int) -> None:
        x = torch.randn(3, n)
        torch.testing.assert_close(work("tpu", x).cpu(), work("cpu", x), rtol=1e-4, atol=1e-5)

    compiles(run, range(10, 10 + LIMIT + 4))
    before = METRICS.snapshot()
    assert compiles(run, range(30, 40)) <= 2  # buckets of what is before and after
    assert METRICS.delta(before)["host_parts"] > 0

"""Every family of ops on padded arrays: as the CPU computes it, whatever stands in the padding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from against_cpu import value_and_gradients
from tpu_core import modes
from tpu_core.metrics import METRICS

# Sizes of the recordings, then of padded runs: in the first bucket, at its end, in the next.
SIZES = (5, 7, 6, 8, 11)


pytestmark = pytest.mark.usefixtures("signatures", "poison")


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


Function = Callable[..., Any]
Inputs = Callable[[int], list[torch.Tensor]]


def floats(*shapes: Callable[[int], tuple[int, ...]]) -> Inputs:
    return lambda n: [torch.randn(s(n)) for s in shapes]


def rows(n: int) -> tuple[int, ...]:
    return (n, 4)


def columns(n: int) -> tuple[int, ...]:
    return (3, n)


def middle(n: int) -> tuple[int, ...]:
    return (2, n, 6)


def square(n: int) -> tuple[int, ...]:
    return (2, n, n)


def image(n: int) -> tuple[int, ...]:
    return (n, 3, 6, 6)


def signal(n: int) -> tuple[int, ...]:
    return (2, 3, n)


def indices(n: int) -> list[torch.Tensor]:
    return [torch.randn(9, 4), torch.randint(0, 9, (2, n))]


def eye(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[-1], device=x.device)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def recurrent(op: Callable[..., Any], gates: int, along: bool) -> tuple[Function, Inputs]:
    """A layer of both directions over sequences, with all its states and weights as inputs."""
    shapes = [(gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)] * 2
    cell = 2 if op is torch.lstm else 1

    def layer(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        hx = list(rest[:cell]) if cell == 2 else rest[0]
        ys, *last = op(x, hx, rest[cell:], True, 1, 0.0, False, True, False)
        return ys + torch.cat([s.flatten(0, 1).mean(0) for s in last]).mean()

    def inputs(n: int) -> list[torch.Tensor]:
        length, batch = (n, 2) if along else (5, n)
        states = [torch.randn(2, batch, 4) for _ in range(cell)]
        return [torch.randn(length, batch, 3), *states, *(torch.randn(s) / 2 for s in shapes)]

    return layer, inputs


def heads(n: int) -> tuple[int, ...]:
    return (2, 2, n, 16)


_WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
_KERNEL = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(2))
_KERNEL_TRANSPOSED = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(4))
_KERNEL_1D = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(3))

_EXPERTS = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(5))


def grouped(x: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([2, len(x)], dtype=torch.int32, device=x.device)
    return F.grouped_mm(x, _EXPERTS.to(x.device).mT, offs=ends)


# name: function of tensors, inputs of a size.
DIFFERENTIABLE: dict[str, tuple[Function, Inputs]] = {
    "spectrum": (lambda x: torch.fft.rfft(x, norm="ortho").abs(), floats(columns)),
    "filter": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[-1]),
        floats(columns),
    ),
    "filter of rows": (
        lambda x: torch.fft.ifft(torch.fft.fft(x, dim=0) * 2j, dim=0).imag,
        floats(rows),
    ),
    "filter of images": (
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[-2:]),
        floats(lambda n: (2, n, n + 3)),
    ),
    "convolution by spectra": (
        lambda x, y: torch.fft.irfft(
            torch.fft.rfft(x, n=2 * x.shape[-1]) * torch.fft.rfft(y, n=2 * x.shape[-1]),
            n=2 * x.shape[-1],
        )[..., : x.shape[-1]],
        floats(columns, lambda n: (n,)),
    ),
    "pointwise": (lambda x: torch.tanh(x) * x + torch.where(x > 0, x, -x).sqrt(), floats(rows)),
    "pointwise of two": (lambda x, y: x * y.sigmoid() - x / (1 + y * y), floats(middle, middle)),
    "broadcast": (lambda x, y: x * y[None, :, None], floats(middle, lambda n: (n,))),
    "clamp and power": (lambda x: x.clamp(-1, 1) ** 3, floats(columns)),
    "gelu and silu": (lambda x: F.gelu(x) + F.silu(x) + F.softplus(x), floats(middle)),
    "sum of all": (lambda x: x.sum(), floats(middle)),
    "sum along": (lambda x: x.sum(0) * 2, floats(rows)),
    "sum beside": (lambda x: x.sum(1), floats(rows)),
    "mean": (lambda x: x.mean(), floats(middle)),
    "mean along": (lambda x: x.mean(1, keepdim=True) - x, floats(middle)),
    "variance": (lambda x: x.var(0) + x.std(dim=0, correction=0), floats(rows)),
    "norm": (lambda x: x.norm() + torch.linalg.vector_norm(x, 1, dim=0), floats(rows)),
    "prod": (lambda x: x.prod(0), floats(rows)),
    "max with index": (lambda x: x.max(1).values + x.amin(1), floats(columns)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), floats(columns)),
    "softmax": (lambda x: x.softmax(-1), floats(columns)),
    "softmax beside": (lambda x: x.softmax(-1), floats(rows)),
    "log softmax": (lambda x: x.log_softmax(0), floats(rows)),
    "cumsum": (lambda x: x.cumsum(1), floats(columns)),
    "cumprod": (lambda x: x.cumprod(1), floats(columns)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), floats(columns)),
    "layer norm": (lambda x: F.layer_norm(x, (6,)), floats(middle)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), floats(rows)),
    "batch norm of images": (
        lambda x: F.batch_norm(x, None, None, training=True) * 2,
        floats(image),
    ),
    # Its gradient is zero but for rounding, which no relative tolerance allows.
    "bias before a batch norm": (
        lambda x, b: F.batch_norm(x + b, None, None, training=True),
        lambda n: [torch.randn(n, 4), torch.randn(4)],
    ),
    "sum of a layer norm": (lambda x: F.layer_norm(x, (6,)).sum((1, 2)), floats(middle)),
    # A number of elements in which the height and width are a size less 2.
    "batch norm of a convolution": (
        lambda x: F.batch_norm(F.conv2d(x, _KERNEL.to(x.device)), None, None, training=True),
        lambda n: [torch.randn(n, 3, n + 3, n + 3)],
    ),
    "group norm": (lambda x: F.group_norm(x, 3), floats(lambda n: (n, 6, 4))),
    "instance norm": (lambda x: F.instance_norm(x), floats(signal)),
    "rms norm": (lambda x: F.rms_norm(x, (6,)), floats(middle)),
    "rms norm along": (lambda x: F.rms_norm(x, x.shape[1:]), floats(columns)),
    "matmul, rows": (lambda x: x @ _WEIGHT.to(x.device)[:4], floats(rows)),
    "matmul, contracted": (lambda x, y: x @ y, floats(columns, rows)),
    "matmul, batched": (lambda x, y: x @ y.transpose(1, 2), floats(middle, middle)),
    "linear": (lambda x: F.linear(x, _WEIGHT.to(x.device)), floats(middle)),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), floats(square, middle)),
    "grouped products": (grouped, floats(rows)),
    "attention": (attention, floats(heads, heads, heads)),
    "causal attention": (
        lambda q, k, v: attention(q, k, v, is_causal=True),
        floats(heads, heads, heads),
    ),
    "attention of one query": (attention, floats(lambda n: (2, 2, 1, 16), heads, heads)),
    "convolution, batch": (
        lambda x: F.conv2d(x, _KERNEL.to(x.device), padding=1, stride=2),
        floats(image),
    ),
    "convolution along": (
        lambda x: F.conv1d(x, _KERNEL_1D.to(x.device), padding=1),
        floats(signal),
    ),
    "convolution with steps": (
        lambda x, w: F.conv1d(x, w, stride=2, padding=1),
        lambda n: [torch.randn(2, 3, n), _KERNEL_1D.clone()],
    ),
    "convolution with steps, of images": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1).sum((2, 3)),
        lambda n: [torch.randn(2, 3, n, n + 4), _KERNEL.clone()],
    ),
    "convolution of each channel": (
        lambda x, w: F.conv1d(x, w, stride=2, padding=1, groups=3),
        lambda n: [torch.randn(2, 3, n), _KERNEL_1D[:3, :1].clone()],
    ),
    "convolution of each channel, batch": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=3),
        lambda n: [torch.randn(n, 3, 6, 6), _KERNEL[:3, :1].clone()],
    ),
    "convolution in groups, batch": (
        lambda x, w: F.conv2d(x, w, groups=2),
        lambda n: [torch.randn(n, 4, 6, 6), torch.randn(6, 2, 3, 3)],
    ),
    "transposed convolution": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1, output_padding=1),
        lambda n: [torch.randn(2, 3, n), _KERNEL_TRANSPOSED.clone()],
    ),
    "max pool along": (lambda x: F.max_pool1d(x, 2), floats(signal)),
    "max pool that overlaps": (
        lambda x: F.max_pool2d(x, 3, 2, 1),
        floats(lambda n: (2, 3, n, n)),
    ),
    "average pool along": (lambda x: F.avg_pool1d(x, 3, 2, 1), floats(signal)),
    "average pool of what counts": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        floats(lambda n: (2, 3, n, 6)),
    ),
    "average pool, large windows": (
        lambda x: F.avg_pool2d(x, 5, 3),
        floats(lambda n: (2, 3, 4 * n, 8)),
    ),
    "unfold": (lambda x: x.unfold(2, 3, 2) * 2, floats(signal)),
    "max pool": (lambda x: F.max_pool2d(x, 2), floats(image)),
    "average pool": (lambda x: F.avg_pool2d(x, 2), floats(image)),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), floats(image)),
    "adaptive max pool": (lambda x: F.adaptive_max_pool2d(x, 1), floats(lambda n: (2, n, n, n))),
    "transpose": (lambda x: x.t().contiguous() * 2, floats(rows)),
    "permute and merge": (lambda x: x.permute(1, 0, 2).reshape(x.shape[1], 12) + 1, floats(middle)),
    "merge with padding inside": (lambda x: (x.reshape(-1, 6) * 2).sum(0), floats(middle)),
    "flatten": (lambda x: x.flatten().softmax(0), floats(middle)),
    "split by heads": (lambda x: x.view(2, -1, 3, 2).transpose(1, 2) * 3, floats(middle)),
    "concatenate along": (lambda x, y: torch.cat([x, y * 2], 0), floats(rows, rows)),
    "concatenate beside": (lambda x, y: torch.cat([x, y], 1).softmax(0), floats(rows, rows)),
    "append": (lambda x, y: torch.cat([x, y], 0) * 2, floats(rows, lambda n: (1, 4))),
    "stack": (lambda x, y: torch.stack([x, y]).sum(1), floats(rows, rows)),
    "index of two dims": (
        lambda x, i: x[i[:, 0], i[:, 1] % 6] * 2,
        lambda n: [torch.randn(n, 6), torch.randint(n, (n, 2))],
    ),
    "constant pad": (lambda x: F.pad(x, (1, 2), value=3.0) * 2, floats(columns)),
    "reflection pad": (lambda x: F.pad(x, (2, 1), mode="reflect") * 2, floats(signal)),
    "reflection pad of a spectrogram": (
        lambda x: F.pad(x, (9, 9), mode="reflect") * 2,
        floats(lambda n: (2, 3, 9 * n)),
    ),
    "replication pad": (lambda x: F.pad(x, (1, 3), mode="replicate") ** 2, floats(signal)),
    "circular pad": (lambda x: F.pad(x, (1, 3), mode="circular") ** 2, floats(signal)),
    "flip": (lambda x: x.flip(1) * torch.arange(3, device=x.device)[:, None], floats(columns)),
    "roll": (lambda x: x.roll(1, 1) * 2, floats(columns)),
    "last element": (lambda x: x[:, -1] * 2, floats(middle)),
    # Of rows of all sequences in one array, which a matrix product makes.
    "last of each sequence": (
        lambda x, w: F.log_softmax((x @ w)[:, -1], -1).exp(),
        floats(middle, lambda n: (6, 5)),
    ),
    "all but the first": (lambda x: (x[:, 1:] - x[:, :-1]).abs().sum(1), floats(middle)),
    "every second": (lambda x: x[:, ::2, ::2].sum(), lambda n: [torch.randn(2, 8, 2 * n)]),
    "searched among": (
        lambda x, y: x.sum() * y * torch.searchsorted(x.detach().sort().values, y.detach()),
        floats(lambda n: (n,), lambda n: (2, n)),
    ),
    "mask of a cache": (lambda x: x.triu(x.shape[1] - x.shape[0]) * 2, floats(columns)),
    "triangle": (lambda x: x.tril() + x.triu(1) * 2, floats(square)),
    "diagonal": (lambda x: torch.diagonal(x, dim1=1, dim2=2).sum(1), floats(square)),
    "embedding": (lambda w, i: F.embedding(i, w).sum(1), indices),
    "index select": (lambda w, i: w.index_select(0, i.flatten()) * 2, indices),
    "gather": (
        lambda x, i: x.gather(1, i),
        lambda n: [torch.randn(3, n), torch.randint(0, n, (3, 2))],
    ),
    "index": (lambda w, i: w[i[0]] + w[i[1]], indices),
    "index add": (
        lambda x, i, y: x.index_add(0, i, y),
        lambda n: [torch.randn(9, 4), torch.randint(0, 9, (n,)), torch.randn(n, 4)],
    ),
    "scatter add": (
        lambda x, i, y: x.scatter_add(0, i, y),
        lambda n: [torch.randn(9, 4), torch.randint(0, 9, (n, 4)), torch.randn(n, 4)],
    ),
    "masked fill": (lambda x: x.masked_fill(x > 0.5, 0.0).sum(1), floats(columns)),
    "cross entropy": (
        lambda x, y: F.cross_entropy(x, y),
        lambda n: [torch.randn(n, 4), torch.randint(0, 4, (n,))],
    ),
    "cross entropy, ignored": (
        lambda x, y: F.cross_entropy(x.view(-1, 6), y.view(-1), ignore_index=2),
        lambda n: [torch.randn(2, n, 6), torch.randint(0, 6, (2, n))],
    ),
    "losses": (
        lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y) + F.smooth_l1_loss(x, y),
        floats(rows, rows),
    ),
    "binary cross entropy": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        floats(rows),
    ),
    "bags of embeddings": (
        lambda w, i: F.embedding_bag(i, w, mode="mean"),
        lambda n: [torch.randn(9, 4), torch.randint(0, 9, (n, n + 2))],
    ),
    "median": (lambda x: x.median(0).values * 2 + x.nanmedian(0).values, floats(rows)),
    "linspace": (
        lambda x: x * torch.linspace(-1, 1, x.shape[0], device=x.device)[:, None],
        floats(rows),
    ),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + 9 * eye(x)), floats(square)),
    "solve": (lambda x, y: torch.linalg.solve(x + 9 * eye(x), y), floats(square, middle)),
    "inverse and determinant": (
        lambda x: (
            torch.linalg.inv(x + 9 * eye(x))
            * torch.linalg.slogdet(x + 9 * eye(x))[1][:, None, None]
        ),
        floats(square),
    ),
    "matrix exponential": (lambda x: torch.linalg.matrix_exp(x / 2), floats(square)),
    "triangular solve": (
        lambda x, y: torch.linalg.solve_triangular(x + 9 * eye(x), y, upper=True),
        floats(square, middle),
    ),
    "triangular solve from the right": (
        lambda x, y: torch.linalg.solve_triangular(x + 9 * eye(x), y.mT, upper=False, left=False),
        floats(square, middle),
    ),
    "right sides of a solve": (
        lambda x, y: torch.linalg.solve(x + 9 * eye(x), y),
        floats(lambda n: (3, 3), columns),
    ),
    "qr": (lambda x: torch.linalg.qr(x).R.abs(), floats(square)),
    "qr of tall matrices": (lambda x: torch.linalg.qr(x).Q.abs(), floats(rows)),
    "sorted": (
        lambda x: x.sort(1).values * torch.arange(3, device=x.device)[:, None],
        floats(columns),
    ),
    "top k": (lambda x: x.topk(2, 1).values, floats(columns)),
    "lstm, many lengths": recurrent(torch.lstm, 4, along=True),
    "gru, many lengths": recurrent(torch.gru, 3, along=True),
    "rnn, many lengths": recurrent(torch.rnn_tanh, 1, along=True),
    "rnn with relu, many lengths": recurrent(torch.rnn_relu, 1, along=True),
    "lstm, many batches": recurrent(torch.lstm, 4, along=False),
    "gru, many batches": recurrent(torch.gru, 3, along=False),
    "two sizes": (
        lambda x, y: x.sum(0) + y.mean(1),
        lambda n: [torch.randn(n, 3), torch.randn(3, 2 * n)],
    ),
}

DISCRETE: dict[str, tuple[Function, Inputs]] = {
    "argmax": (lambda x: x.argmax(1), floats(columns)),
    "argmax of all": (lambda x: x.argmax(), floats(middle)),
    "argmin": (lambda x: x.argmin(0), floats(rows)),
    "argsort": (lambda x: x.argsort(1), floats(columns)),
    "top k indices": (lambda x: x.topk(2, 1).indices, floats(columns)),
    "any and all": (lambda x: (x > 0).any(1) & ~(x > 5).all(1), floats(columns)),
    "count": (lambda x: (x > 0).sum(1), floats(columns)),
    "integer sum": (
        lambda x: x.sum(0) + x.max(0).values,
        lambda n: [torch.randint(-9, 9, (n, 4))],
    ),
    "arange": (lambda x: torch.arange(x.shape[0], device=x.device) * 2, floats(rows)),
    "sizes as numbers": (lambda x: x.sum(1) / x.shape[1] * x.shape[0], floats(columns)),
    "one hot": (lambda x: F.one_hot(x, 5), lambda n: [torch.randint(0, 5, (n,))]),
    "full": (lambda x: torch.full((x.shape[0],), 3, device=x.device).cumsum(0), floats(rows)),
    "loop of unknown length": (
        lambda x, y: x**y,
        lambda n: [torch.randint(-3, 3, (n, 4)), torch.randint(0, 9, (n, 4))],
    ),
    "search": (
        lambda x, y: torch.searchsorted(x, y),
        lambda n: [torch.arange(100.0), torch.randn(n, 4) * 50],
    ),
    "singular values": (torch.linalg.svdvals, floats(columns)),
    "of each matrix the singular values": (torch.linalg.svdvals, floats(lambda n: (n, 4, 3))),
    "of each matrix the eigenvalues": (
        lambda x: torch.linalg.eigvalsh(x @ x.mT),
        floats(lambda n: (n, 3, 4)),
    ),
    "of each matrix the pseudoinverse": (torch.linalg.pinv, floats(lambda n: (n, 4, 3))),
    "of each row the spectrum": (lambda x: torch.fft.rfft(x).abs(), floats(lambda n: (n, 2, 8))),
    "of each image the spectrum": (
        lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real,
        floats(lambda n: (3, n, 4, 6)),
    ),
    "half": (lambda x: x.bfloat16().sum(1, dtype=torch.float32), floats(columns)),
}


def padded_runs() -> int:
    return int(METRICS.snapshot()["padded_executions"])


def compare(function: Function, inputs: Inputs, backward: bool) -> None:
    before = padded_runs()
    for n in SIZES:
        tensors = inputs(n)
        expected = value_and_gradients(function, tensors, "cpu", backward)
        actual = value_and_gradients(function, tensors, "tpu", backward)
        for want, have in zip(expected, actual, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=2e-5)
    # The first size runs as it is; so may another, where an earlier test ran the same ops.
    assert padded_runs() - before >= len(SIZES) - 2


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_and_gradients(name):
    compare(*DIFFERENTIABLE[name], backward=True)


@pytest.mark.parametrize("name", DISCRETE)
def test_values(name):
    compare(*DISCRETE[name], backward=False)


# The first is the one that the padded program is checked with.
@pytest.mark.parametrize("seed", [(1 << 64) - 1, 3])
def test_random_numbers_are_those_of_the_exact_program(seed):
    drawn = []
    for mode in ("strict", "fused"):
        torch.manual_seed(seed)
        with modes.using(mode):
            drawn.append(
                [
                    (
                        torch.rand(2, n, 3, device="tpu")
                        + F.dropout(torch.ones(n, 5, device="tpu")).sum()
                        + attention(*torch.ones(3, 1, 2, n, 4, device="tpu"), dropout_p=0.5).sum()
                    ).cpu()
                    for n in SIZES
                ]
            )
    for strict, fused in itertools.zip_longest(*drawn):
        torch.testing.assert_close(fused, strict)


@pytest.mark.parametrize(
    "function, why",
    [
        (
            lambda x: torch.linalg.eigvalsh(x @ x.mT).sum(0, keepdim=True),
            r"test_padded_ops.py:\d+/aten._linalg_eigh: eigenvectors of matrices whose size varies",
        ),
    ],
    ids=["eigh"],
)
def test_what_cannot_be_padded_is_named_and_runs_as_it_is(function, why):
    for n in (5, 6, 11, 9, 13, 10):
        seen, before = len(METRICS.compile_events()), padded_runs()
        x = torch.randn(n, 4)
        torch.testing.assert_close(function(x.to("tpu")).cpu(), function(x), rtol=1e-4, atol=1e-4)
    # The last one.
    (event,) = METRICS.compile_events()[seen:]
    assert re.search(f"not on padded arrays: {why}", event.reason)
    assert padded_runs() == before

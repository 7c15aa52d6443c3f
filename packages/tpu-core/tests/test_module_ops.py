"""Ops that ``torch.nn`` calls and that are recorded by a way of their own, on the device.

Some have no meta function, some write arguments that their schema does not mark, some are inference
fast paths that record the ordinary path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture(autouse=True)
def no_fallback() -> Any:
    before = torch.tpu.metrics()["fallbacks"]
    yield
    assert torch.tpu.metrics()["fallbacks"] == before


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree(fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Results and gradients of ``fn`` are those of the CPU."""
    outcomes = []
    for device in ("cpu", "tpu"):
        args = [x.detach().clone().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
        result = fn(*args)
        (result * torch.arange(1.0, result.numel() + 1).view_as(result).to(device)).sum().backward()
        outcomes.append([result, *(a.grad for a in args if a.grad is not None)])
    for expected, actual in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_rms_norm_has_a_gradient() -> None:
    agree(lambda x, w: F.rms_norm(x, (8,), w, 1e-5), random(4, 8), random(8, seed=1))
    agree(lambda x: F.rms_norm(x, (4, 8)), random(2, 4, 8))


def test_batch_norm_without_running_statistics() -> None:
    agree(lambda x: F.batch_norm(x, None, None, training=True), random(4, 3, 5))


def test_losses_without_meta_function() -> None:
    labels = torch.tensor([1, 0, 7, 3])
    agree(lambda x, y: F.multi_margin_loss(x, y), random(4, 8), labels)
    several = torch.tensor([[1, 2, -1, 0, 0, 0, 0, 0]] * 4)
    agree(lambda x, y: F.multilabel_margin_loss(x, y), random(4, 8), several)
    targets = torch.tensor([[1, 2, 3], [2, 1, 4]])
    agree(
        lambda x, y: F.ctc_loss(x.log_softmax(2), y, torch.tensor([6, 6]), torch.tensor([3, 2])),
        random(6, 2, 8),
        targets,
    )


def test_logcumsumexp() -> None:
    agree(lambda x: torch.logcumsumexp(x, 1), random(4, 8))


def test_masked_softmax() -> None:
    mask = random(2, 2, 4, 4, seed=1) > 1
    agree(lambda x, m: torch._masked_softmax(x, m, 3, 2), random(2, 2, 4, 4), mask)


def test_batch_norms_in_evaluation_save_nothing() -> None:
    aten, x, c = torch.ops.aten, random(4, 3, 5), random(3).abs()
    for op, *rest in (
        (aten._native_batch_norm_legit, False, 0.1, 1e-5),
        (aten._native_batch_norm_legit_functional, False, 0.1, 1e-5),
        (aten._native_batch_norm_legit_no_training, 0.1, 1e-5),
        (aten._batch_norm_no_update, 0.1, 1e-5),
    ):
        want = op(x, c, c, c, c, *rest)
        got = op(x.to("tpu"), *[c.to("tpu")] * 4, *rest)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(0,), (3,)])
def test_batch_norm_in_evaluation_leaves_out_tensors_of_statistics(size: tuple[int]) -> None:
    x, c = random(4, 3, 5), random(3).abs()
    results = []
    for device in ("cpu", "tpu"):
        outs = [torch.full(s, 7.0, device=device) for s in ((0,), size, size)]
        args = [t.to(device) for t in (x, c, c, c, c)]
        torch.ops.aten._native_batch_norm_legit.out(
            *args, False, 0.1, 1e-5, out=outs[0], save_mean=outs[1], save_invstd=outs[2]
        )
        results.append([t.cpu() for t in outs])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_out_tensors_of_ops_without_a_meta_function_are_resized() -> None:
    x, results = random(4, 3, 5), []
    for device in ("cpu", "tpu"):
        a, *outs = x.to(device), *(torch.zeros(0, device=device) for _ in range(5))
        torch.geqrf(a[0], out=tuple(outs[:2]))
        torch.ops.aten._native_batch_norm_legit.no_stats_out(
            a, None, None, True, 0.1, 1e-5, out=outs[2], save_mean=outs[3], save_invstd=outs[4]
        )
        results.append([t.cpu() for t in outs])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_ops_of_sync_batch_norm_write_the_running_statistics() -> None:
    """Two processes' halves of a batch, as `nn.SyncBatchNorm` joins them."""
    x, grad = random(6, 3, 5), random(6, 3, 5, seed=1)
    module = nn.BatchNorm1d(3, affine=False)
    input_cpu = x.clone().requires_grad_()
    expected = module(input_cpu)
    expected.backward(grad)

    parts = x.to("tpu").split([4, 2])
    gradients = grad.to("tpu").split([4, 2])
    stats = [torch.batch_norm_stats(p, 1e-5) for p in parts]
    counts = torch.tensor([20.0, 10.0], device="tpu")
    running_mean, running_var = torch.zeros(3, device="tpu"), torch.ones(3, device="tpu")
    mean, rstd = torch.batch_norm_gather_stats_with_counts(
        parts[0],
        torch.stack([s[0] for s in stats]),
        torch.stack([s[1] for s in stats]),
        running_mean,
        running_var,
        0.1,
        1e-5,
        counts,
    )
    torch.testing.assert_close(running_mean.cpu(), module.running_mean)
    torch.testing.assert_close(running_var.cpu(), module.running_var)
    results = [torch.batch_norm_elemt(p, None, None, mean, rstd, 1e-5) for p in parts]
    torch.testing.assert_close(torch.cat(results).cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    sums = [
        torch.batch_norm_backward_reduce(g, p, mean, rstd, None, True, False, False)
        for g, p in zip(gradients, parts)
    ]
    total, dot = sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]
    inputs = [
        torch.batch_norm_backward_elemt(g, p, mean, rstd, None, total, dot, counts.int())
        for g, p in zip(gradients, parts)
    ]
    torch.testing.assert_close(torch.cat(inputs).cpu(), input_cpu.grad, rtol=1e-4, atol=1e-5)


def test_batch_norm_update_stats() -> None:
    x = random(4, 3, 5)
    expected = [torch.zeros(3), torch.ones(3)]
    actual = [t.to("tpu") for t in expected]
    saved = torch.batch_norm_update_stats(x, *expected, 0.1)
    saved_on_device = torch.batch_norm_update_stats(x.to("tpu"), *actual, 0.1)
    for a, e in zip([*saved_on_device, *actual], [*saved, *expected]):
        torch.testing.assert_close(a.cpu(), e)


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
MASKS = {"none": (None, None), "causal": (CAUSAL, None), "padding": (None, PADDING)} | {
    "both": (CAUSAL, PADDING)
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_encoder_layer_in_evaluation_mode(options: dict[str, Any], masks: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options).eval()
    on_device = copy.deepcopy(layer).to("tpu")
    x = random(2, 5, 16)
    mask, padding = MASKS[masks]
    with torch.no_grad():
        expected = layer(x, src_mask=mask, src_key_padding_mask=padding)
        mask, padding = (m if m is None else m.to("tpu") for m in MASKS[masks])
        actual = on_device(x.to("tpu"), src_mask=mask, src_key_padding_mask=padding)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_in_evaluation_mode_packs_nothing() -> None:
    """The CPU packs padded sequences into a nested tensor; values at the padding differ."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = random(2, 5, 16)
    with torch.inference_mode():
        expected = model(x, src_key_padding_mask=PADDING)
        actual = model.to("tpu")(x.to("tpu"), src_key_padding_mask=PADDING.to("tpu"))
    kept = ~PADDING
    torch.testing.assert_close(actual.cpu()[kept], expected[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_attention_in_evaluation_mode(weights: bool, average: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = random(2, 5, 16)

    def run(device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        q = x.to(device)
        return module.to(device)(
            q,
            q,
            q,
            key_padding_mask=PADDING.to(device),
            need_weights=weights,
            average_attn_weights=average,
        )

    with torch.no_grad():
        expected, actual = run("cpu"), run("tpu")
    torch.testing.assert_close(actual[0].cpu(), expected[0], rtol=1e-4, atol=1e-5)
    if weights:
        torch.testing.assert_close(actual[1].cpu(), expected[1], rtol=1e-4, atol=1e-5)
    else:
        assert actual[1] is None


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim: int | None) -> None:
    def run(x: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch._weight_norm(v, g, -1 if dim is None else dim))

    g = {0: (5, 1), 1: (1, 4), None: ()}[dim]
    agree(run, random(3, 4), random(5, 4, seed=1), random(*g, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products(dtype: torch.dtype) -> None:
    a, b = random(10, 16).to(dtype), random(3, 16, 8, seed=1).to(dtype)
    ends = torch.tensor([3, 7, 10], dtype=torch.int32)
    actual = F.grouped_mm(a.to("tpu"), b.to("tpu"), offs=ends.to("tpu")).cpu()
    expected = torch.cat(
        [a[i:j].float() @ b[k].float() for k, (i, j) in enumerate([(0, 3), (3, 7), (7, 10)])]
    )
    torch.testing.assert_close(actual, expected.to(dtype), rtol=2e-3, atol=1e-3)


def test_a_value_in_a_host_scalar() -> None:
    x, index, value = (
        torch.ones(3, device="tpu"),
        torch.tensor([0], device="tpu"),
        torch.tensor(2.0),
    )
    assert x.masked_fill(x > 0, value).tolist() == [2, 2, 2]
    assert x.index_fill(0, index, value).tolist() == [2, 1, 1]
    x.index_fill_(0, index, value)
    assert x.masked_fill_(x < 2, torch.tensor(5.0)).tolist() == [2, 5, 5]


def test_random_integers_below_a_bound() -> None:
    torch.manual_seed(0)
    drawn = torch.empty(1000, dtype=torch.int64, device="tpu").random_(5)
    assert drawn.unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_bits_of_narrowed_integers_in_one_program(dtype: torch.dtype) -> None:
    """XLA:CPU crashes on the plain form."""
    p, q = torch.tensor([1, 2, -3], device="tpu"), torch.tensor([3, 6, 5], device="tpu")
    assert (p.to(dtype) & q.to(dtype)).tolist() == [1, 2, 5]
    assert (p.to(dtype) | q.to(dtype)).tolist() == [3, 6, -3]
    assert (p.to(dtype) ^ q.to(dtype)).tolist() == [2, 4, -8]

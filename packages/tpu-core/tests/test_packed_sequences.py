"""``pack_padded_sequence`` and ``pad_packed_sequence``: as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def packed_and_padded(
    device: str, seed: int, batch_first: bool, total_length: int | None
) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    n = 1 + seed % 5
    lengths = torch.randint(1, 9, (n,), generator=g)
    steps = int(lengths.max()) + seed % 3
    shape = (n, steps, 4) if batch_first else (steps, n, 4)
    x = torch.randn(shape, generator=g).to(device).requires_grad_()
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
    y, found = pad_packed_sequence(packed, batch_first, -1.5, total_length)
    places = torch.arange(y.numel(), device=device).view(y.shape)
    (y.sin() * places).sum().backward()
    results = [packed.data, y, x.grad, packed.batch_sizes, found]
    return [*(t.detach().cpu() for t in results), y.stride()]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("total_length", [None, 11])
def test_values_and_gradients(
    every_tier: None, batch_first: bool, total_length: int | None
) -> None:
    for seed in range(8):
        results = [packed_and_padded(d, seed, batch_first, total_length) for d in ("cpu", "tpu")]
        for want, have in zip(*results, strict=True):
            torch.testing.assert_close(have, want)


def test_second_derivatives_and_other_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        results = []
        for device in ("cpu", "tpu"):
            x = torch.arange(24.0).view(3, 4, 2).to(device, dtype).requires_grad_()
            y, _ = pad_packed_sequence(pack_padded_sequence(x, [4, 3, 1], True), True)
            (grad,) = torch.autograd.grad((y * y * y).abs().sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(grad.abs().sum(), x)
            results.append([y.detach().cpu(), grad.detach().cpu(), again.cpu()])
        for want, have in zip(*results, strict=True):
            torch.testing.assert_close(have, want)


def test_without_gradient() -> None:
    x = torch.randn(3, 4, 2)
    packed = pack_padded_sequence(x, [4, 3, 1], True)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            there = pack_padded_sequence(x.to("tpu"), [4, 3, 1], True)
            assert torch.equal(there.data.cpu(), packed.data)
            padded = pad_packed_sequence(there)[0]
            assert torch.equal(padded.cpu(), pad_packed_sequence(packed)[0])


def raised(function: Any) -> str | None:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def errors(device: str) -> list[str | None]:
    pack = torch.ops.aten._pack_padded_sequence.default
    x = torch.randn(3, 4, 2).to(device).requires_grad_()
    packed = pack_padded_sequence(x, [4, 3, 1], True)
    empty = torch.tensor([], dtype=torch.int64)
    calls = [
        lambda: pack(x, torch.tensor([4, 2]), True),
        lambda: pack(x, torch.tensor([1, 2, 3]), True),
        lambda: pack(x, torch.tensor([2, 1, 0]), True),
        lambda: pack(x[:0], empty, True),
        lambda: pack(x, torch.tensor([5, 2, 1]), True)[0].sum().backward(),
        lambda: pack(x, torch.tensor([3, 2, 1], device="tpu"), True),
        lambda: pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes.to("tpu"))),
        lambda: pad_packed_sequence(packed, total_length=2),
        lambda: pad_packed_sequence(PackedSequence(packed.data[:5], packed.batch_sizes)),
    ]
    return [raised(call) for call in calls]


def test_errors_are_those_of_pytorch() -> None:
    found = errors("tpu")
    assert found == errors("cpu")
    assert all(found[:7])

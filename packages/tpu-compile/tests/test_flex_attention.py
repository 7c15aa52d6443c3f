"""``flex_attention`` on the device against PyTorch's eager formula on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from tpu_compile.graph_op import GRAPHS

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.tpu.synchronize()  # what is recorded still needs its graphs
    GRAPHS.clear()
    yield
    torch._dynamo.reset()


def results(
    f: Callable[..., Any], inputs: list[Tensor], device: str, compiled: bool
) -> list[Tensor]:
    """Results and gradients of a function of the inputs and the device."""
    xs = [x.detach().to(device).requires_grad_() for x in inputs]
    # PyTorch has gradients on the CPU, but refuses to give them since its kernel has none.
    with patch.object(flex, "_validate_device", lambda *_: None):
        run = torch.compile(f, fullgraph=True) if compiled else f
        found = run(*xs)
    found = [found] if isinstance(found, Tensor) else list(found)
    torch.autograd.backward([r.square().sum() for r in found if r.requires_grad])
    return [t.detach().cpu() for t in (*found, *(x.grad for x in xs)) if t is not None]


def check(make: Callable[[str], Callable[..., Any]], *inputs: Tensor) -> None:
    """Compare results and gradients.

    Args:
        make: Gives the function for a device.
        inputs: Query, key, value and what else it takes; all get gradients.
    """
    want = results(make("cpu"), list(inputs), "cpu", compiled=False)
    torch._dynamo.reset()
    got = results(make("tpu"), list(inputs), "tpu", compiled=True)
    assert len(GRAPHS) == 2  # forward and backward, neither of them op by op
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def qkv(heads: int = 2, queries: int = 24, keys: int = 24) -> list[Tensor]:
    return [torch.randn(2, h, n, 8) for h, n in ((2, queries), (heads, keys), (heads, keys))]


def test_scores_and_a_block_mask() -> None:
    def make(device: str) -> Callable[..., Any]:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 24, 24, device=device)

        def f(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Any:
            def biased(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
                return score + slope[h] * (m - n)

            return flex_attention(q, k, v, score_mod=biased, block_mask=mask)

        return f

    check(make, *qkv(), torch.randn(2))


def test_grouped_heads_and_statistics() -> None:
    def make(device: str) -> Callable[..., Any]:
        def f(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out, lse = flex_attention(q, k, v, scale=0.3, enable_gqa=True, return_lse=True)
            return out, lse

        return f

    check(make, *qkv(heads=1, queries=16))


def test_rows_that_see_nothing() -> None:
    def make(device: str) -> Callable[..., Any]:
        length = torch.tensor([5, 0], device=device)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k < length[b]

        mask = create_block_mask(seen, 2, None, 24, 24, device=device)
        return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)

    check(make, *qkv())


def test_a_table_that_two_indices_read() -> None:
    def make(device: str) -> Callable[..., Any]:
        def f(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
            def relative(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
                return torch.tanh(score) * table[h, m - n + 24]

            return flex_attention(q, k, v, score_mod=relative)

        return f

    check(make, *qkv(), torch.randn(2, 48))


def windowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 9)


@pytest.mark.parametrize("queries, keys", [(24, 24), (20, 27)])
def test_blocks_of_a_window(queries: int, keys: int) -> None:
    def make(device: str) -> Callable[..., Any]:
        mask = create_block_mask(
            windowed, None, None, queries, keys, device=device, BLOCK_SIZE=(4, 8)
        )

        def f(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
            def relative(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
                return torch.tanh(score) * table[h, m - n + 27]

            aux = AuxRequest(lse=True)
            out, made = flex_attention(q, k, v, relative, mask, enable_gqa=True, return_aux=aux)
            assert made.lse is not None
            return out, torch.where(made.lse.isfinite(), made.lse, 0)

        return f

    check(make, *qkv(1, queries, keys), torch.randn(2, 54))


def test_blocks_of_each_sequence_and_head() -> None:
    def make(device: str) -> Callable[..., Any]:
        # Of documents; the second head sees only what is near.
        documents = torch.tensor([[0] * 10 + [1] * 14, [0] * 3 + [1] * 4 + [2] * 17], device=device)
        reach = torch.tensor([24, 5], device=device)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (documents[b, q] == documents[b, k]) & (q - k < reach[h])

        mask = create_block_mask(seen, 2, 2, 24, 24, device=device, BLOCK_SIZE=4)
        return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)

    check(make, *qkv())


def test_blocks_that_are_not_named_are_not_read() -> None:
    mask = create_block_mask(windowed, None, None, 24, 24, device="tpu", BLOCK_SIZE=8)
    f = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    q, k, v = qkv()
    whole, cut = (x.clone() for x in (k, k))
    cut[:, :, :8] = torch.nan
    want, got = (f(q.to("tpu"), x.to("tpu"), v.to("tpu")).cpu() for x in (whole, cut))
    # The last queries' window begins in the second block of keys.
    torch.testing.assert_close(got[:, :, 16:], want[:, :, 16:])
    assert got[:, :, :16].isnan().any()


def test_blocks_that_are_full_have_no_mask() -> None:
    # Of a row's blocks the first list has the mask, the second has not.
    partial, full = (torch.tensor([[n]], dtype=torch.int32) for n in ([1, 1, 0], [0, 1, 2]))
    own = torch.tensor([[[[0, 0, 0], [1, 0, 0], [0, 0, 0]]]], dtype=torch.int32)
    whole = torch.tensor([[[[0, 0, 0], [2, 0, 0], [2, 0, 0]]]], dtype=torch.int32)
    given = partial.to("tpu"), own.to("tpu"), full.to("tpu"), whole.to("tpu")
    mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=8, mask_mod=lambda b, h, q, k: q >= k)
    f = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    q, k, v = qkv()
    causal, all_, none = torch.ones(8, 8).tril(), torch.ones(8, 8), torch.zeros(8, 8)
    blocks = ((causal, none, none), (none, causal, all_), (all_, none, all_))
    seen = torch.cat([torch.cat(row, 1) for row in blocks]).bool()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(f(*(x.to("tpu") for x in (q, k, v))).cpu(), want)


def test_the_highest_scores() -> None:
    q, k, v = qkv()
    f = torch.compile(flex_attention, fullgraph=True)
    _, aux = f(*(x.to("tpu") for x in (q, k, v)), return_aux=AuxRequest(max_scores=True))
    torch.testing.assert_close(aux.max_scores.cpu(), (q @ k.mT / 8**0.5).amax(-1))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_uncompiled() -> None:
    inputs = qkv()
    f: Callable[..., Any] = lambda q, k, v: flex_attention(q, k, v)  # noqa: E731
    want, got = (results(f, inputs, device, compiled=False) for device in ("cpu", "tpu"))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)

"""Attention over pages: values against PyTorch in float64, and when the kernel is chosen."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_core.lowering.implementations import Target
from tpu_kernels import KernelRuleError, paged_attention
from tpu_kernels.ops.paged import PagedArguments
from tpu_kernels.ops.paged_attention.api import KERNEL
from tpu_kernels.ops.paged_attention.pallas import paged_attention as kernel

LENGTHS = [37, 0, 1, 64]


def call(
    heads: int, key_heads: int, size: int, page: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Arguments for sequences of up to 64 keys; behind each sequence's end there is rubbish."""
    places = 64 // page
    query = torch.randn(len(LENGTHS), heads, size, dtype=dtype)
    pages = torch.randn(2, key_heads, len(LENGTHS) * places + 3, page, size, dtype=dtype)
    order = torch.randperm(pages.size(2))[: len(LENGTHS) * places].view(-1, places)
    lengths = torch.tensor(LENGTHS)
    for sequence, length in enumerate(LENGTHS):
        used = -(-length // page)
        pages[:, :, order[sequence, used:]] = torch.nan
        order[sequence, used:] = 10_000
    return [query, *pages, lengths, order]


def expected(
    arguments: list[torch.Tensor], scale: float | None = None, softcap: float = 0.0
) -> torch.Tensor:
    """One sequence after the other, in float64."""
    query, keys, values, lengths, places = (
        x.double() if x.is_floating_point() else x for x in arguments
    )
    out = torch.zeros_like(query)
    for i, length in enumerate(lengths.tolist()):
        used = places[i, : -(-length // keys.size(2))]
        k, v = (x[:, used].flatten(1, 2)[:, :length] for x in (keys, values))
        k, v = (x.repeat_interleave(query.size(1) // len(x), 0) for x in (k, v))
        scores = torch.einsum("he,hse->hs", query[i], k) * (scale or query.size(2) ** -0.5)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        out[i] = torch.einsum("hs,hse->he", scores.softmax(1), v)
    return out


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 2.0}])
def test_plain_values(options: dict[str, float]) -> None:
    arguments = call(6, 2, 20, 4, torch.float32)
    got = paged_attention(*(x.to("tpu") for x in arguments), **options)
    torch.testing.assert_close(
        got.cpu().double(), expected(arguments, **options), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("heads", [4, 16])
def test_values_of_the_kernel(heads: int) -> None:
    arguments = call(heads, 2, 128, 16, torch.bfloat16)
    options = {"scale": 0.1, "softcap": 3.0} if heads == 4 else {}
    with tpu_kernels.using(paged_attention="pallas"):
        got = paged_attention(*(x.to("tpu") for x in arguments), **options)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.cpu().double(), expected(arguments, **options), atol=2e-2, rtol=2e-2
    )


def test_a_compiled_step_is_that_of_eager() -> None:
    arguments = call(4, 2, 16, 8, torch.float32)
    moved = [x.to("tpu") for x in arguments]
    got = torch.compile(lambda *a: paged_attention(*a) * 2, fullgraph=True)(*moved)
    torch.testing.assert_close(got.cpu().double(), 2 * expected(arguments), atol=1e-5, rtol=1e-5)


def test_when_the_kernel_is_chosen() -> None:
    given = PagedArguments((4, 8, 128), (2, 20, 16, 128), (4, 5), "bfloat16")
    tpu = Target("tpu", kind="TPU v5e")
    assert KERNEL.select(given, tpu, None).name == "pallas"
    assert KERNEL.select(given, Target("cpu"), None).name == "plain"
    assert KERNEL.select(given, Target("tpu", kind="TPU v3"), None).name == "plain"
    assert KERNEL.select(given, Target("tpu", 4), None).name == "plain"
    for change, rule in (
        ({"dtype": "float32"}, "The dtype is bfloat16"),
        ({"query": (4, 8, 64)}, "The head size is a multiple of 128, 512 at most."),
        ({"pages": (2, 20, 4, 128)}, "A page has a multiple of 8 keys, 1,024 at most."),
        ({"places": (4, 50_000)}, "There are at most 196,608 indices of pages"),
        ({"places": (4, 0)}, "No dimension is 0."),
    ):
        other = replace(given, **change)
        assert KERNEL.select(other, tpu, None).name == "plain"
        with pytest.raises(KernelRuleError, match=rule):
            KERNEL.select(other, tpu, "pallas")


def test_a_program_for_tpus_has_the_kernel() -> None:
    pages = jax.ShapeDtypeStruct((2, 20, 16, 128), "bfloat16")
    arguments = [
        *(jax.ShapeDtypeStruct((4, 8, 128), "bfloat16"), pages, pages),
        *(jax.ShapeDtypeStruct(shape, "int32") for shape in [(4,), (4, 5)]),
    ]
    with Target("tpu").applied(), jax.enable_x64(True):
        traced = jax.jit(lambda *a: kernel(*a, 0.1, 0.0)).trace(*arguments)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 1


def test_shapes_that_do_not_fit() -> None:
    q, k, v, lengths, places = (x.to("tpu") for x in call(4, 2, 16, 8, torch.float32))
    for arguments, message in (
        ((q[0], k, v, lengths, places), "takes query"),
        ((q, k, v[:, 1:], lengths, places), "takes query"),
        ((q[:, :3], k, v, lengths, places), "3 heads of size 16, and key_pages 2 of size 16"),
        ((q[..., 1:], k, v, lengths, places), "sizes have to be equal"),
        ((q, k, v, lengths[1:], places), "for 4 sequences lengths is"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments)
    with pytest.raises(TypeError, match="lengths is torch.float32, and has to be of integers"):
        paged_attention(q, k, v, lengths.float(), places)


def test_a_sequence_of_one_page_is_attention() -> None:
    q, k, v = torch.randn(3, 2, 16), torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16)
    places = torch.arange(3)[:, None]
    got = paged_attention(*(x.to("tpu") for x in (q, k, v, torch.full((3,), 8), places)))
    attention = F.scaled_dot_product_attention(q[:, :, None], k.transpose(0, 1), v.transpose(0, 1))
    torch.testing.assert_close(got.cpu(), attention[:, :, 0])

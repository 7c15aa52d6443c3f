"""Attention of ragged batches over pages: values, and when the kernel is chosen."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from ragged_reference import expected
from tpu_core.lowering.implementations import Target
from tpu_kernels import KernelRuleError, ragged_paged_attention
from tpu_kernels.ops.paged import PagedArguments
from tpu_kernels.ops.ragged_paged_attention.api import KERNEL
from tpu_kernels.ops.ragged_paged_attention.pallas import ragged_paged_attention as kernel

# Keys of each sequence, and how many of its tokens are new: a prompt, single tokens, a part of one.
LENGTHS, NEW = [7, 30, 1, 32], [7, 1, 1, 5]


def call(heads: int = 4, key_heads: int = 2, size: int = 16, page: int = 8) -> list[torch.Tensor]:
    """Arguments with two tokens of no sequence at the end."""
    places = 32 // page
    query = torch.randn(sum(NEW) + 2, heads, size)
    pages = torch.randn(len(LENGTHS) * places, page, 2 * key_heads, size)
    order = torch.randperm(len(pages)).view(-1, places)
    for sequence, length in enumerate(LENGTHS):
        order[sequence, -(-length // page) :] = -1
    starts = torch.tensor([0, *NEW]).cumsum(0)
    return [query, pages, torch.tensor(LENGTHS), order, starts]


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 2.0, "window": 4}])
def test_plain_values(options: dict[str, float]) -> None:
    arguments = call()
    got = ragged_paged_attention(*(x.to("tpu") for x in arguments), **options)
    wanted = expected(arguments, len(LENGTHS), **options)
    torch.testing.assert_close(got.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


def test_sequences_behind_the_count_are_left_out() -> None:
    arguments = call()
    moved = [x.to("tpu") for x in arguments]
    for count in (2, 0):
        got = ragged_paged_attention(*moved, torch.tensor([count], device="tpu"))
        wanted = expected(arguments, count)
        torch.testing.assert_close(got.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


def test_plain_values_are_those_that_the_kernel_promises() -> None:
    arguments = call()
    moved = [x.to("tpu") for x in arguments]
    arrays = [
        jnp.asarray(x.numpy().astype(np.float32 if i < 2 else np.int32))
        for i, x in enumerate(arguments)
    ]
    count = jnp.asarray([1], jnp.int32)
    wanted = ref_ragged_paged_attention(*arrays, count, sm_scale=0.25, sliding_window=9)
    got = ragged_paged_attention(*moved, scale=0.25, window=9).cpu()
    np.testing.assert_allclose(got[: NEW[0]], wanted, atol=1e-5, rtol=1e-5)


def test_when_the_kernel_is_chosen() -> None:
    given = PagedArguments((64, 8, 128), (20, 16, 4, 128), (4, 5), "bfloat16")
    tpu = Target("tpu", kind="TPU v5e")
    assert KERNEL.select(given, tpu, None).name == "pallas"
    for target, rule in (
        (Target("cpu"), "Pallas' interpreter lacks masked stores"),
        (Target("tpu"), "The generation of the chip is known"),
        (Target("tpu", kind="TPU v3"), "v4 or later"),
        (Target("tpu", 4, "TPU v5e"), "The program is for one device"),
    ):
        assert KERNEL.select(given, target, None).name == "plain"
        with pytest.raises(KernelRuleError, match=rule):
            KERNEL.select(given, target, "pallas")
    for change, rule in (
        ({"dtype": "float32"}, "The dtype is bfloat16"),
        ({"query": (64, 8, 256)}, "The head size is 128."),
        ({"pages": (20, 16, 6, 128)}, "There are 1, 2 or 4 key heads"),
        ({"pages": (20, 4, 4, 128)}, "A page has a multiple of 8 keys"),
        ({"places": (4, 50_000)}, "at most 196,608 indices"),
        ({"places": (4, 0)}, "No dimension is 0."),
    ):
        other = replace(given, **change)
        assert KERNEL.select(other, tpu, None).name == "plain"
        with pytest.raises(KernelRuleError, match=rule):
            KERNEL.select(other, tpu, "pallas")


def test_a_program_for_tpus_has_the_kernel() -> None:
    shapes = [((24, 8, 128), "bfloat16"), ((20, 16, 4, 128), "bfloat16")]
    shapes += [(s, "int32") for s in ((4,), (4, 5), (5,), (1,))]
    arguments = [jax.ShapeDtypeStruct(*s) for s in shapes]
    with Target("tpu", kind="TPU v5e").applied(), jax.enable_x64(True):
        traced = jax.jit(lambda *a: kernel(*a, 0.1, 0.0, 0)).trace(*arguments)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 1


def test_shapes_that_do_not_fit() -> None:
    q, pages, lengths, places, starts = (x.to("tpu") for x in call())
    for arguments, message in (
        ((q[0], pages, lengths, places, starts), "takes query"),
        ((q, pages[:, :, :3], lengths, places, starts), "takes query"),
        ((q[:, :3], pages, lengths, places, starts), "3 heads of size 16, and pages 2 of size 16"),
        ((q, pages, lengths[1:], places, starts), "for 3 sequences page_indices is"),
        ((q, pages, lengths[0], places, starts), "for 1 sequences page_indices is"),
        ((q, pages, lengths, places, starts[1:]), "for 4 sequences"),
        ((q, pages, lengths, places, starts, lengths), "count"),
    ):
        with pytest.raises(ValueError, match=message):
            ragged_paged_attention(*arguments)


def test_what_is_no_integer_is_refused() -> None:
    q, pages, *rest = (x.to("tpu") for x in call())
    for i, name in enumerate(("lengths", "page_indices", "starts")):
        others = [x.double() if i == j else x for j, x in enumerate(rest)]
        with pytest.raises(TypeError, match=f"{name} is torch.float64, and has to be of integers"):
            ragged_paged_attention(q, pages, *others)
    with pytest.raises(TypeError, match="count is torch.bool"):
        ragged_paged_attention(q, pages, *rest, torch.tensor([True], device="tpu"))


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window is -4"):
        ragged_paged_attention(*(x.to("tpu") for x in call()), window=-4)

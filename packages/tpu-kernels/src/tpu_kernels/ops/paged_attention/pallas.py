"""Paged attention by JAX's kernel, which reads the pages where they are.

The kernel is `jax.experimental.pallas.ops.tpu.paged_attention`.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as kernel

from tpu_core.array_types import Float, Int
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.paged import FEW_INDICES, NOT_EMPTY
from tpu_kernels.ops.paged_attention import reference
from tpu_kernels.ops.paged_attention.arguments import OVERLOAD
from tpu_kernels.ops.registry import Implementation, Rule
from tpu_kernels.ops.rules import HAS_BFLOAT16
from tpu_kernels.ops.sharding_utils import HEADS_DIVIDED, on_parts

# Keys that are fetched at a time: pages are small.
_KEYS = 512
_LARGEST_PAGE = 1024


def _pages_at_a_time(places: int, page: int) -> int:
    """As many pages as divide a sequence's evenly and have no more than `_KEYS` keys."""
    return max(n for n in range(1, places + 1) if places % n == 0 and (n == 1 or n * page <= _KEYS))


def paged_attention(
    query: Float[Array, "sequences heads head_size"],
    key_pages: Float[Array, "key_heads pages page_size head_size"],
    value_pages: Float[Array, "key_heads pages page_size head_size"],
    lengths: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    scale: float,
    softcap: float,
) -> Float[Array, "sequences heads head_size"]:
    """As `tpu_kernels.ops.paged_attention.reference.paged_attention`, for what `PALLAS` takes."""
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    return on_parts(
        functools.partial(_on_one_device, **options),
        functools.partial(reference.paged_attention, **options),
        (query, key_pages, value_pages, lengths, page_indices),
        of_heads=(1, 0, 0, None, None),
        of_sequences=(0, None, None, 0, 0),
        key_heads=len(key_pages),
        takes=lambda heads: True,
    )


def _on_one_device(
    query: Float[Array, "sequences heads head_size"],
    key_pages: Float[Array, "key_heads pages page_size head_size"],
    value_pages: Float[Array, "key_heads pages page_size head_size"],
    lengths: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    scale: float,
    softcap: float,
) -> Float[Array, "sequences heads head_size"]:
    sequences, heads, size = query.shape
    places, page = page_indices.shape[1], key_pages.shape[2]
    # The kernel fetches whole blocks of pages, and at least one of a sequence: those behind its end
    # are its first, which are numbers, as what is behind the end is multiplied by 0.
    is_used = np.arange(places) * page < lengths[:, None]
    page_indices = jnp.where(is_used, page_indices, page_indices[:, :1])
    page_indices = jnp.clip(page_indices, 0, key_pages.shape[1] - 1).astype(np.int32)
    scaled = query.astype(np.float32) * np.float32(scale)
    with calling(query.dtype, 4 * sequences * heads * size * places * page):
        out = kernel(
            scaled,
            key_pages,
            value_pages,
            jnp.maximum(lengths, 1).astype(np.int32),
            page_indices,
            attn_logits_soft_cap=softcap or None,
            pages_per_compute_block=_pages_at_a_time(places, page),
        )
    return jnp.where(lengths[:, None, None] > 0, out, 0).astype(query.dtype)


PALLAS = Implementation(
    "pallas",
    "The kernel of JAX: reads the pages where they are, up to each sequence's length.",
    platforms=("tpu",),
    dtypes=("bfloat16",),
    rules=(
        NOT_EMPTY,
        Rule(
            "The head size is a multiple of 128, 512 at most.",
            lambda a, target: a.query[2] % 128 == 0 and a.query[2] <= 512,
        ),
        Rule(
            f"A page has a multiple of 8 keys, {_LARGEST_PAGE:,} at most.",
            lambda a, target: a.pages[2] % 8 == 0 and a.pages[2] <= _LARGEST_PAGE,
        ),
        FEW_INDICES,
        HEADS_DIVIDED,
        HAS_BFLOAT16,
    ),
    functions=MappingProxyType({OVERLOAD: paged_attention}),
)

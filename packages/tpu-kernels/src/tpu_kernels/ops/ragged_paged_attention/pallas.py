"""Ragged paged attention by JAX's kernel, which reads the pages where they are.

The kernel is `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention as kernel,
)

from tpu_core.array_types import Float, Int
from tpu_core.extend import AbstractChip, Target
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.paged import FEW_INDICES, NOT_EMPTY, PagedArguments
from tpu_kernels.ops.ragged_paged_attention import reference
from tpu_kernels.ops.ragged_paged_attention.arguments import OVERLOAD
from tpu_kernels.ops.registry import Implementation, Rule
from tpu_kernels.ops.sharding_utils import HEADS_DIVIDED, on_parts

# Of a block: what fits into 16 MiB of vector memory, beside the results.
_KEYS = 256
_ROWS = 2048  # queries times heads
_QUERIES = 32
_LARGEST_PAGE = _KEYS


def ragged_paged_attention(
    query: Float[Array, "tokens heads head_size"],
    pages: Float[Array, "pages page_size combined_heads head_size"],
    lengths: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    starts: Int[Array, " sequences+1"],
    count: Int[Array, " 1"],
    scale: float,
    softcap: float,
    window: int,
) -> Float[Array, "tokens heads head_size"]:
    """As `ops.ragged_paged_attention.plain.ragged_paged_attention`, for what `PALLAS` takes."""
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window}
    return on_parts(
        functools.partial(_on_one_device, **options),
        functools.partial(reference.ragged_paged_attention, **options),
        (query, pages, lengths, page_indices, starts, count),
        of_heads=(1, 2, None, None, None, None),
        of_sequences=(None,) * 6,
        key_heads=pages.shape[2] // 2,
        takes=_takes,
    )


def _on_one_device(
    query: Float[Array, "tokens heads head_size"],
    pages: Float[Array, "pages page_size combined_heads head_size"],
    lengths: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    starts: Int[Array, " sequences+1"],
    count: Int[Array, " 1"],
    scale: float,
    softcap: float,
    window: int,
) -> Float[Array, "tokens heads head_size"]:
    tokens, heads, size = query.shape
    page, places = pages.shape[1], page_indices.shape[1]
    # The kernel asks jax which chip it is for; a mesh that the program is divided over says it.
    around = jax.sharding.get_abstract_mesh()
    mesh = AbstractChip(Target.current().kind or "").mesh({"chip": 1}) if around.empty else around
    products = 4 * tokens * heads * size * places * page
    with jax.sharding.use_abstract_mesh(mesh), calling(query.dtype, products):
        out = kernel(
            query,
            pages,
            lengths.astype(np.int32),
            jnp.clip(page_indices, 0, len(pages) - 1).astype(np.int32),
            starts.astype(np.int32),
            count.astype(np.int32),
            sm_scale=scale,
            sliding_window=window or None,
            soft_cap=softcap or None,
            num_kv_pages_per_block=min(max(_KEYS // page, 1), places),
            num_queries_per_block=max(1, min(_QUERIES, _ROWS // heads)),
        )
    is_token = jnp.arange(tokens) < starts[count[0]]
    return jnp.where(is_token[:, None, None], out, 0)


def _takes(key_heads: int) -> bool:
    return key_heads in (1, 2, 4) or key_heads % 8 == 0


def _key_heads(a: PagedArguments, target: Target) -> bool:
    return _takes(a.pages[2] // 2)


PALLAS = Implementation(
    "pallas",
    "The kernel of JAX: reads the pages where they are, up to each sequence's length.",
    platforms=("tpu",),
    dtypes=("bfloat16",),
    rules=(
        Rule(
            "The program is for a TPU: Pallas' interpreter lacks masked stores as the kernel has "
            "them, which its tests spell out.",
            lambda a, target: target.platform == "tpu",
        ),
        Rule(
            "The generation of the chip is known, and is v4 or later.",
            lambda a, target: target.kind not in (None, "TPU v2", "TPU v3"),
        ),
        HEADS_DIVIDED,
        NOT_EMPTY,
        Rule("The head size is 128.", lambda a, target: a.query[2] == 128),
        Rule("There are 1, 2 or 4 key heads, or a multiple of 8.", _key_heads),
        Rule(
            f"A page has a multiple of 8 keys, {_LARGEST_PAGE} at most.",
            lambda a, target: a.pages[1] % 8 == 0 and a.pages[1] <= _LARGEST_PAGE,
        ),
        FEW_INDICES,
    ),
    functions=MappingProxyType({OVERLOAD: ragged_paged_attention}),
)

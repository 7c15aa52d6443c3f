"""The arguments of ragged paged attention, as far as rules ask about them."""

from __future__ import annotations

from typing import Any

from tpu_kernels.ops.paged import PagedArguments
from tpu_kernels.ops.rules import common_dtype

# The overload of ragged paged attention.
OVERLOAD = "tpu_kernels.ragged_paged_attention.default"


def bind(query: Any, pages: Any, lengths: Any, page_indices: Any, *rest: Any) -> PagedArguments:
    """From those of the op; ``rest`` are starts, their number, and options.

    The pages are ``(pages, page size, 2 * key heads, head size)``.
    """
    return PagedArguments(
        tuple(query.shape),
        tuple(pages.shape),
        tuple(page_indices.shape),
        common_dtype(query, pages),
    )

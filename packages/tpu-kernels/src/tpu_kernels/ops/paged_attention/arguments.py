"""The arguments of paged attention, as far as rules ask about them."""

from __future__ import annotations

from typing import Any

from tpu_kernels.ops.paged import PagedArguments
from tpu_kernels.ops.rules import common_dtype

# The overload of paged attention.
OVERLOAD = "tpu_kernels.paged_attention.default"


def bind(
    query: Any, key_pages: Any, value_pages: Any, lengths: Any, page_indices: Any, *rest: Any
) -> PagedArguments:
    """From those of the op; ``rest`` are scale and cap.

    The pages are those of the keys and of the values each, ``(key heads, pages, page size, head
    size)``.
    """
    return PagedArguments(
        tuple(query.shape),
        tuple(key_pages.shape),
        tuple(page_indices.shape),
        common_dtype(query, key_pages, value_pages),
    )

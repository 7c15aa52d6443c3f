"""The arguments of paged attention, as far as rules ask about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class PagedArguments:
    """A call of paged attention.

    Attributes:
        query: Shape, ``(sequences, heads, head size)``.
        pages: Shape of the keys and of the values, ``(key heads, pages, page size, head size)``.
        places: Shape of the indices, ``(sequences, pages of a sequence)``.
        dtype: Of queries, keys and values; ``"mixed"`` where they differ.
    """

    query: tuple[int, ...]
    pages: tuple[int, ...]
    places: tuple[int, ...]
    dtype: str

    def describe(self) -> dict[str, object]:
        """See `tpu_kernels.ops.registry.Arguments`."""
        return {
            "query": f"{self.dtype}{list(self.query)}",
            "pages": list(self.pages),
            "page_indices": list(self.places),
        }


def bind(
    query: Any, key_pages: Any, value_pages: Any, lengths: Any, page_indices: Any, *rest: Any
) -> PagedArguments:
    """From those of the op; ``rest`` are scale and cap."""
    dtypes = {np.dtype(x.dtype).name for x in (query, key_pages, value_pages)}
    return PagedArguments(
        tuple(query.shape),
        tuple(key_pages.shape),
        tuple(page_indices.shape),
        dtypes.pop() if len(dtypes) == 1 else "mixed",
    )

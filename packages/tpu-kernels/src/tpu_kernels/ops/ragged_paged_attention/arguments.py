"""The arguments of ragged paged attention, as far as rules ask about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RaggedArguments:
    """A call of ragged paged attention.

    Attributes:
        query: Shape, ``(tokens, heads, head size)``.
        pages: Shape, ``(pages, page size, 2 * key heads, head size)``.
        places: Shape of the indices, ``(sequences, pages of a sequence)``.
        dtype: Of queries and pages; ``"mixed"`` where they differ.
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


def bind(query: Any, pages: Any, lengths: Any, page_indices: Any, *rest: Any) -> RaggedArguments:
    """From those of the op; ``rest`` are starts, their number, and options."""
    dtypes = {np.dtype(x.dtype).name for x in (query, pages)}
    return RaggedArguments(
        tuple(query.shape),
        tuple(pages.shape),
        tuple(page_indices.shape),
        dtypes.pop() if len(dtypes) == 1 else "mixed",
    )

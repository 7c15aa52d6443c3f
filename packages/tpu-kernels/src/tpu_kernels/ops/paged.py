"""Common parts of ops whose keys and values are in pages."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_kernels.ops.registry import Rule

# In the megabyte of scalar memory, which has some more to hold.
_INDICES = 3 * 2**16


@dataclass(frozen=True, slots=True)
class PagedArguments:
    """A call, as far as rules ask about it.

    Attributes:
        query: Shape, ``(sequences or tokens, heads, head size)``.
        pages: Shape, as the op has it.
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


NOT_EMPTY = Rule("No dimension is 0.", lambda a, target: 0 not in (*a.query, *a.pages, *a.places))
FEW_INDICES = Rule(
    f"There are at most {_INDICES:,} indices of pages: they are in scalar memory.",
    lambda a, target: a.places[0] * a.places[1] <= _INDICES,
)

"""Common parts of ops whose keys and values are in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def check_integers(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse numbers that a cast to int32 would round.

    Args:
        op: Name of the op, for the message.
        **tensors: Its arguments of integers by name.

    Raises:
        TypeError: One of them is of another dtype.
    """
    for name, x in tensors.items():
        if x is not None and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            raise TypeError(f"{op}: {name} is {x.dtype}, and has to be of integers (torch.int32).")

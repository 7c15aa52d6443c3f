"""The arguments of a product with a weight of 4 bits, as far as rules ask about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_kernels.ops.rules import common_dtype

# The overloads that products with weights of 4 bits are on the device.
PACKED = "tpu_kernels.int4_mm.default"
OF_CUDA = "aten._weight_int4pack_mm.default"


@dataclass(frozen=True, slots=True)
class Int4Arguments:
    """A call.

    Attributes:
        rows: Shape of what is multiplied.
        packed: Shape of the weight: two dimensions as a TPU reads it, four as CUDA does.
        group: Columns that share a scale and a zero.
        dtype: Of rows, scales and zeros; ``"mixed"`` where they differ.
    """

    rows: tuple[int, ...]
    packed: tuple[int, ...]
    group: int
    dtype: str

    def describe(self) -> dict[str, object]:
        """See `tpu_kernels.ops.registry.Arguments`."""
        return {
            "x": f"{self.dtype}{list(self.rows)}",
            "packed": list(self.packed),
            "group": self.group,
        }


def of_call(x: Any, packed: Any, group: int, scales_and_zeros: Any) -> Int4Arguments:
    """From those of either overload."""
    return Int4Arguments(
        tuple(x.shape), tuple(packed.shape), int(group), common_dtype(x, scales_and_zeros)
    )

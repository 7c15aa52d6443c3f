"""The arguments of a grouped product, as far as rules ask about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_kernels.ops.rules import common_dtype

# The overload that a grouped product is on the device; its gradient is two more of it.
GROUPED_MM = "aten._grouped_mm.default"


@dataclass(frozen=True, slots=True)
class GroupedArguments:
    """A call of ``torch.nn.functional.grouped_mm``.

    Attributes:
        left, right: Shapes of the operands.
        groups: Number of groups.
        dtype: Of both; ``"mixed"`` where they differ.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    groups: int
    dtype: str

    def describe(self) -> dict[str, object]:
        """See `tpu_kernels.ops.registry.Arguments`."""
        return {
            "mat_a": f"{self.dtype}{list(self.left)}",
            "mat_b": list(self.right),
            "groups": self.groups,
        }


def of_call(
    self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> GroupedArguments:
    """From those of ``_grouped_mm``."""
    return GroupedArguments(
        tuple(self.shape),
        tuple(mat2.shape),
        self.shape[0] if offs is None else offs.shape[0],
        common_dtype(self, mat2),
    )

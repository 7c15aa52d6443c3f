"""Replay of recorded ops on the host, for inspections of a segment that ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpu_core.compiler.segment import Node
from tpu_core.dtypes import TO_TORCH
from tpu_core.lowering.views import SLICE, Access
from tpu_core.recorder.functional_variants import functional, overload_of


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call of a functional overload with CPU tensors.

    Attributes:
        op: The overload.
        arguments: Its arguments by name; a list of tensors is a list.
    """

    op: torch._ops.OpOverload
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Call the op on the CPU; raises what PyTorch raises there."""
        return self.op(**self.arguments)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each tensor argument."""
        for name, value in self.arguments.items():
            items = value if isinstance(value, list) else [value]
            for i, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    yield (f"{name}[{i}]" if isinstance(value, list) else name), item


def call_of(
    node: Node, operands: Sequence[torch.Tensor], numbers: Sequence[float | int]
) -> HostCall | None:
    """The call behind a node, or None where there is no functional overload.

    Args:
        node: A node of a segment.
        operands: Values of its operand slots, on the CPU.
        numbers: The segment's numbers from the node's first on.
    """
    if node.plan is None:
        return None
    op = functional(overload_of(node.plan.op))
    if op is None:
        return None
    positional, keywords, _ = node.plan.arguments(operands, iter(numbers), _read, _number, zeros)
    return HostCall(op, {**dict(zip(node.plan.positional_names(), positional)), **keywords})


def _read(base: torch.Tensor, access: Access, starts: Sequence[int]) -> torch.Tensor:
    # The device is named because torch.set_default_device may be in force.
    memory = torch.empty_strided(
        access.base_sizes, access.base_strides, dtype=base.dtype, device="cpu"
    )
    memory.copy_(base)
    offset = access.offset
    if access.form == SLICE:
        # The access was described at its first use; since then the window may have moved.
        offset = sum(s * access.base_strides[j] for s, j in zip(starts, access.starts()))
    empty = torch.empty(0, dtype=TO_TORCH[access.dtype], device="cpu")
    return empty.set_(memory.untyped_storage(), offset, access.sizes, access.strides)


def _number(value: Any, dtype: np.dtype[Any]) -> torch.Tensor:
    return torch.tensor(value, dtype=TO_TORCH[dtype], device="cpu")


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """Value of uninitialised memory, as it is read."""
    return torch.zeros(shape, dtype=TO_TORCH[dtype], device="cpu")

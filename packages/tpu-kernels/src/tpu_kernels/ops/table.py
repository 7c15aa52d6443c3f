"""The ops of the library, and the choice among their implementations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import MappingProxyType

from tpu_core.extend import KernelSelection
from tpu_kernels.ops.attention.api import KERNEL as ATTENTION
from tpu_kernels.ops.cross_entropy.api import KERNEL as CROSS_ENTROPY
from tpu_kernels.ops.grouped_mm.api import KERNEL as GROUPED_MM
from tpu_kernels.ops.int4_mm.api import KERNEL as INT4_MM
from tpu_kernels.ops.paged_attention.api import KERNEL as PAGED_ATTENTION
from tpu_kernels.ops.ragged_paged_attention.api import KERNEL as RAGGED_PAGED_ATTENTION
from tpu_kernels.ops.registry import Op

KERNELS: MappingProxyType[str, Op] = MappingProxyType(
    {
        op.name: op
        for op in (
            ATTENTION,
            PAGED_ATTENTION,
            RAGGED_PAGED_ATTENTION,
            GROUPED_MM,
            INT4_MM,
            CROSS_ENTROPY,
        )
    }
)


def using(**implementations: str) -> AbstractContextManager[None]:
    """Context manager: compute ops by the implementations that are named, in a block.

    Without it an op takes the first implementation whose rules hold, as the page *Kernels* of the
    reference lists them. The choice holds for the whole process, as that of
    `torch.nn.attention.sdpa_kernel` does, and for what is recorded or called in the block: a
    backward pass that runs after it chooses for itself.

    Args:
        implementations: Name of an implementation by name of an op.

    Raises:
        ValueError: There is no such op or implementation.
        KernelRuleError: The implementation does not take the arguments; raised at the op.

    Example:
        >>> with tpu_kernels.using(attention="plain"):
        ...     y = F.scaled_dot_product_attention(q, k, v)
    """
    for op, name in implementations.items():
        if op not in KERNELS:
            raise ValueError(f"There is no kernel '{op}'. There are {', '.join(sorted(KERNELS))}.")
        KERNELS[op].find(name)
    return KernelSelection.using(implementations)

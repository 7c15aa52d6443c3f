"""Patterns of calls: ranks, and which sizes are equal. Of each, one call is tried on the CPU.

PyTorch's meta functions in Python leave checks out that its kernels make, of a mask that does not
fit, of a bias of another length: a program would broadcast it in silence, or fail at a later line.
Whether a call is right hardly ever depends on more than its pattern, so that trials are few, and
stand-ins with small sizes are enough: where those fail, the call itself is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tpu_core.recorder import error_parity
from tpu_core.recorder.error_parity import SmallReplicas, tensors
from tpu_core.recorder.functional_variants import is_out_variant, lowering_of, overload_name
from tpu_core.recorder.suspicions import NOT_TRIED

# Sizes that mean something of their own: channels of an image, sides of a kernel.
_SMALL = 4
# Their errors depend on values: of ones and zeros no matrix is regular.
_OF_VALUES = frozenset({"linalg", "lu"})
# The device takes sizes and strides of them that the CPU's kernels refuse.
_WIDER = frozenset(
    "_grouped_mm _scaled_mm _scaled_mm_v2 _convert_weight_to_int4pack _weight_int4pack_mm".split()
)
_known: set[tuple[Any, ...]] = set()


def is_unlike_others(
    op: torch._ops.OpOverload, target: torch._ops.OpOverload, args: Sequence[Any]
) -> bool:
    """Return whether no call of this pattern has passed, and stand-ins of this one fail.

    Args:
        op: The overload that was called; its schema names the arguments.
        target: The overload that the CPU has in its place.
        args: Its arguments.
    """
    if not _is_tried(op) or not tensors(list(args)):
        return False
    sizes: dict[int, int] = {n: n for n in range(_SMALL + 1)}
    pattern = (op, torch.get_default_dtype(), *(_pattern(a, sizes) for a in args))
    if pattern in _known:
        return False
    # Sizes in their order, as one may have to be less than another.
    large = sorted(n for n in sizes if n > _SMALL)
    small = dict(zip(large, itertools.count(_SMALL + 1)))
    if error_parity.fails(op, target, args, lambda fill: SmallReplicas(small, fill)):
        return True
    _known.add(pattern)
    return False


def passed(op: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Note that a call, whose stand-ins failed, is right."""
    sizes: dict[int, int] = {n: n for n in range(_SMALL + 1)}
    _known.add((op, torch.get_default_dtype(), *(_pattern(a, sizes) for a in args)))


def _is_tried(op: torch._ops.OpOverload) -> bool:
    name = overload_name(op)
    # Backward ops are autograd's, with what the device's forward ops saved.
    if not name.startswith("aten.") or "backward" in name or is_out_variant(op):
        return False
    if name.split(".")[1] in NOT_TRIED | _WIDER:
        return False
    entry = lowering_of(op)
    return entry is None or entry.family not in _OF_VALUES


def _pattern(argument: Any, sizes: dict[int, int]) -> Any:
    """An argument with large sizes in the order in which they come first."""

    def named(n: int) -> int:
        return sizes.setdefault(n, len(sizes)) if n > _SMALL else n

    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.layout, tuple(named(n) for n in argument.shape)
    if isinstance(argument, (list, tuple)):
        return tuple(_pattern(a, sizes) for a in argument)
    if isinstance(argument, bool) or not isinstance(argument, (int, float, complex)):
        return argument
    return named(argument) if isinstance(argument, int) else type(argument)

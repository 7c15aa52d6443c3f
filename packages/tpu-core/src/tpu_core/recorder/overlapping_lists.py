"""Ops on lists whose items overlap in memory: ``torch._foreach_mul_([x, x], 2)`` doubles twice.

PyTorch's CPU kernels walk the lists, so that an item sees what the items before it wrote. The
lowering computes all items from the values before the op. A tensor that is given twice, such as a
tied weight in ``clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 1.0)``, therefore
takes an op an item.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from tpu_core.recorder.functional_variants import is_out_variant, written_arguments


def items_depend(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an item of the lists of an op reads or writes memory that another writes.

    Out= overloads compute every item before they write one, as the lowering does.

    Args:
        op: Any overload.
        args: Its positional arguments.

    Example:
        >>> x = torch.ones(3, device="tpu")
        >>> items_depend(torch.ops.aten._foreach_mul_.Scalar, ([x, x], 2))
        True
        >>> items_depend(torch.ops.aten._foreach_add_.List, ([x], [x]))
        False
    """
    names = written_arguments(op)
    if is_out_variant(op) or not any(
        a.name in names and isinstance(x, (list, tuple)) and len(x) > 1
        for a, x in zip(op._schema.arguments, args)
    ):
        return False
    spans: dict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)
    for a, values in zip(op._schema.arguments, args):
        # A tensor that all items read, such as a factor, is of no item.
        items = enumerate(values) if isinstance(values, (list, tuple)) else [(-1, values)]
        for item, x in items:
            if isinstance(x, torch.Tensor) and x.numel() and x.device.type != "cpu":
                storage = x.untyped_storage()._cdata
                spans[storage].append((*_span(x), item, a.name in names))
    return any(
        i != j and (written or other_written) and start < other_end and other_start < end
        for shared in spans.values()
        for n, (start, end, i, written) in enumerate(shared)
        for other_start, other_end, j, other_written in shared[n + 1 :]
    )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    first = int(x.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return first * x.element_size(), (last + 1) * x.element_size()


def call_each(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Call an in-place op on lists once an item, in order."""
    count = next(
        len(x)
        for a, x in zip(op._schema.arguments, args)
        if a.name in written_arguments(op) and isinstance(x, (list, tuple))
    )
    for i in range(count):
        one = [_item(a, x, i) for a, x in zip(op._schema.arguments, args)]
        positional = [x for a, x in zip(op._schema.arguments, one) if not a.kwarg_only]
        keywords = {a.name: x for a, x in zip(op._schema.arguments, one) if a.kwarg_only}
        op(*positional, **keywords)


def _item(argument: torch._C.Argument, value: Any, i: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [value[i]] if value else value  # such as max_exp_avg_sqs without amsgrad
    if argument.name == "scalars":  # one number an item, as one tensor
        return value[i : i + 1]
    return value

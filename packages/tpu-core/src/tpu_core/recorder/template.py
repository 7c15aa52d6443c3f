"""Arguments of a recorded call, with placeholders for tensors and runtime scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from tpu_core.dtypes import dtype_of_code, to_numpy_dtype
from tpu_core.lowering.registry import Lowering
from tpu_core.recorder import op_schema, plan
from tpu_core.recorder.functional_variants import (
    OVERWRITING,
    is_out_variant,
    overload_name,
    written_arguments,
)


def aval_of(t: Any) -> Any:
    """Shape and dtype of a tensor, or of each in a list; None for anything else."""
    if isinstance(t, torch.Tensor):
        return jax.ShapeDtypeStruct(tuple(t.shape), to_numpy_dtype(t.dtype))
    if isinstance(t, (list, tuple)):
        return [aval_of(x) for x in t]
    return None


def template_of(
    op: torch._ops.OpOverload, args: tuple[Any, ...], entry: Lowering | None
) -> list[tuple[str, bool, Any]]:
    """The arguments, walked in the order in which the extension walks them.

    Args:
        op: The overload that was called.
        args: Its arguments, one for each of the schema.
        entry: Its lowering, or None for a graph.

    Returns:
        For each argument that the lowering takes: its name, whether it is a keyword, and its value
        or placeholders.
    """
    walk = _Walk(op, entry)
    template: list[tuple[str, bool, Any]] = []
    for a, value in zip(op._schema.arguments, args):
        policy = op_schema.policy_of(op, a)
        if policy in (op_schema.DROP, op_schema.GENERATOR) or a.name in Lowering.DROPPED_ARGUMENTS:
            continue
        name = plan.hidden(a.name) if a.is_out else a.name
        held = None if value is None else walk.held(a, policy, value)
        template.append((name, a.kwarg_only, held))
    return template


class _Walk:
    """Placeholders for the arguments of a call; operands are numbered as they are met."""

    def __init__(self, op: torch._ops.OpOverload, entry: Lowering | None) -> None:
        self._overwrites = is_out_variant(op) or overload_name(op) in OVERWRITING
        self._written = set(written_arguments(op))
        self._static = entry.static if entry else None
        self._fills = op_schema.fills(op)
        self._takes_scalars = op_schema.takes_scalars(op, entry)
        self._operands = 0

    def held(self, argument: Any, policy: Any, value: Any) -> Any:
        by_policy: dict[Any, Callable[[Any, Any], Any]] = {
            op_schema.TENSOR: self._tensor,
            op_schema.TENSOR_LIST: lambda a, list_: [
                None if t is None else self._tensor(a, t) for t in list_
            ],
            op_schema.NUMBER: self._number,
            op_schema.INTEGERS: lambda _, value: (
                plan.Number() if isinstance(value, int) else [plan.Number() for _ in value]
            ),
            op_schema.NUMBER_LIST: self._numbers,
        }
        if policy in by_policy:
            return by_policy[policy](argument, value)
        kind = str(argument.real_type)
        if kind in ("ScalarType", "Optional[ScalarType]") and isinstance(value, int):
            return dtype_of_code(value)
        return value

    def _tensor(self, argument: Any, t: Any) -> Any:
        if not isinstance(t, torch.Tensor):  # a number that PyTorch had wrapped in a tensor
            return plan.Number() if self._is_number(t) else t
        if t.device.type == "cpu" and t.dim() == 0 and self._takes_scalars and not t.is_complex():
            return plan.Number(to_numpy_dtype(t.dtype))
        is_written = argument.name in self._written
        if is_written and self._overwrites:
            return plan.written(plan.Blank(aval_of(t)))
        operand = plan.Operand(self._operands)
        self._operands += 1
        return plan.written(operand) if is_written else operand

    def _is_lifted(self, argument: Any) -> bool:
        return self._static is not None and argument.name not in self._static

    def _number(self, argument: Any, value: Any) -> Any:
        return plan.Number() if self._is_lifted(argument) and self._is_number(value) else value

    def _numbers(self, argument: Any, values: Any) -> Any:
        if self._is_lifted(argument) and op_schema.alike(values):
            return plan.Repeated(len(values))
        return [self._number(argument, v) for v in values]

    def _is_number(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and (self._fills or not isinstance(value, bool))

"""Padded constants, hidden from libtpu, which fails to compile products of them."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

from tpu_core.pjrt.guards import walk

# The operand that is placed in a larger array.
_PLACED = {"stablehlo.pad": 0, "stablehlo.dynamic_update_slice": 1}


def hide_padded_constants(module: ir.Module) -> None:
    """Put a barrier behind each constant that is padded or written into a larger array, in place.

    libtpu takes the product of ``[[1, 0]]`` and a weight apart by the blocks of the constant, and
    its verifier then refuses what that made.

    Args:
        module: StableHLO.
    """
    calls: dict[str, list[Any]] = defaultdict(list)

    def collect(op: Any) -> None:
        if op.name == "func.call":
            calls[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].append(op)

    walk(module, collect)
    walk(module, functools.partial(_hide, calls=calls))


def _hide(op: Any, calls: dict[str, list[Any]]) -> None:
    position = _PLACED.get(op.name)
    if position is None or not _may_be_constant(op.operands[position], calls):
        return
    with ir.InsertionPoint(op), op.location:
        op.operands[position] = hlo.optimization_barrier([op.operands[position]])


def _may_be_constant(value: Any, calls: dict[str, list[Any]]) -> bool:
    """Return whether a value follows from constants alone; results of calls are taken for such."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        owner = value.owner
        if isinstance(owner, ir.Block):
            function = owner.owner
            if function.operation.name != "func.func":  # of a loop or a branch
                return False
            name = ir.StringAttr(function.attributes["sym_name"]).value
            arguments = [call.operands[value.arg_number] for call in calls[name]]
            if not any(_may_be_constant(argument, calls) for argument in arguments):
                return False
        elif owner.operation.name == "stablehlo.optimization_barrier":
            return False
        elif owner.operation.name != "func.call":
            pending.extend(owner.operation.operands)
    return True

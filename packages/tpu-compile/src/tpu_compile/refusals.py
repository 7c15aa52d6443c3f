"""Calls of a graph that PyTorch's kernels refuse.

Tracing asks meta functions, of which many leave the checks of dtypes to the kernels: a product of
integers and floats was computed. A graph is split around such a call, so that eager raises
PyTorch's error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tpu_compile.sizes import SYMBOLIC
from tpu_core.extend import GraphEvaluator

_KEY = "tpu_compile_refused"


def is_refused(node: Node) -> bool:
    """Return whether the kernel refuses the call of an overload of ATen.

    Args:
        node: Calls a functional overload, with a fake tensor of each tensor among its arguments.
    """
    if _KEY not in node.meta:  # it is asked of each part of a graph again
        node.meta[_KEY] = _is_refused(node)
    return bool(node.meta[_KEY])


def _is_refused(node: Node) -> bool:
    op: Any = node.target
    # Backward ops are autograd's, with what the device's forward ops saved.
    if op.namespace != "aten" or "backward" in op._schema.name:
        return False
    given = map_arg(_in_order(op, node), lambda n: n.meta["val"])
    try:
        with _disable_current_modes():
            args = tree_map(_stand_in, given)
            is_call = any(isinstance(x, torch.Tensor) for x in tree_flatten(args)[0])
            return is_call and GraphEvaluator.refuses(op, args)
    except _Unknown:
        return False


class _Unknown(Exception):
    """A size has no value to go by."""


def _in_order(op: Any, node: Node) -> tuple[Any, ...]:
    rest = op._schema.arguments[len(node.args) :]
    return (*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest))


def _stand_in(x: Any) -> Any:
    """A tensor that nothing has written in place of a fake one; a number for a symbolic one."""
    if isinstance(x, SYMBOLIC):
        if not x.node.has_hint():
            raise _Unknown
        return x.node.hint
    if not isinstance(x, torch.Tensor):
        return x
    if x.layout != torch.strided:
        raise _Unknown
    size, stride = ([_stand_in(n) for n in group] for group in (x.size(), x.stride()))
    # What is exported may be traced for the CPU; there a tensor may stand for a number.
    device = x.device if x.dim() == 0 else "tpu"
    return torch.empty_strided(size, stride, dtype=x.dtype, device=device)

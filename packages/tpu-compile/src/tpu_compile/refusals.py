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

from tpu_compile.sizes import hint
from tpu_core.extend import GraphEvaluator

# Answers of this process, by op and arguments: layers repeat, and a graph is asked in parts again.
_MOST = 1 << 14
_known: dict[Any, bool] = {}


def is_refused(node: Node) -> bool:
    """Return whether the kernel refuses the call of an overload of ATen.

    Args:
        node: Calls a functional overload, with a fake tensor of each tensor among its arguments.
    """
    op: Any = node.target
    # Backward ops are autograd's, with what the device's forward ops saved.
    if op.namespace != "aten" or "backward" in op._schema.name:
        return False
    given = map_arg(_in_order(op, node), lambda n: n.meta["val"])
    tensors = [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
    if not tensors or any(x.layout != torch.strided for x in tensors):
        return False
    with _disable_current_modes():
        try:
            args = tree_map(_stand_in, given)
        except ValueError:  # of `hint`: a size has no value to go by
            return False
        key = op, torch.get_default_dtype(), _description(args)
        if key not in _known:
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = GraphEvaluator.refuses(op, args)
        return _known[key]


def _description(x: Any) -> Any:
    """All that an answer depends on of an argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.device.type, tuple(x.size()), x.stride()
    if isinstance(x, (list, tuple)):
        return tuple(map(_description, x))
    return type(x), repr(x)  # -0.0 and NaN are themselves


def _in_order(op: Any, node: Node) -> tuple[Any, ...]:
    rest = op._schema.arguments[len(node.args) :]
    return (*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest))


def _stand_in(x: Any) -> Any:
    """A tensor that nothing has written in place of a fake one; a number for a symbolic one."""
    if not isinstance(x, torch.Tensor):
        return hint(x)
    size, stride = ([hint(n) for n in group] for group in (x.size(), x.stride()))
    # What is exported may be traced for the CPU; there a tensor may stand for a number.
    device = x.device if x.dim() == 0 else "tpu"
    return torch.empty_strided(size, stride, dtype=x.dtype, device=device)

"""Pytrees in functions that Dynamo traces, which cannot look into JAX.

An outline says in nested tuples what a pytree is made of; Dynamo takes it for a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

_LEAF = "leaf"


def outline_of(value: Any, leaves: list[torch.Tensor]) -> Any:
    """The outline of a pytree, whose tensors are appended to ``leaves`` in JAX's order.

    Raises:
        TypeError: It holds something that is neither a tensor nor a container that Python has.
    """
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _LEAF
    if value is None:
        return None
    if isinstance(value, dict):
        return "dict", tuple((k, outline_of(value[k], leaves)) for k in sorted(value))
    if isinstance(value, (list, tuple)):
        items = tuple(outline_of(v, leaves) for v in value)
        kind = type(value)
        return ("named", kind, items) if hasattr(value, "_fields") else (kind.__name__, items)
    raise TypeError(
        f"a pytree under torch.compile may hold dict, list, tuple and tensors, not {type(value)}"
    )


def filled(outline: Any, leaves: Iterator[Any]) -> Any:
    """The pytree of an outline with the leaves in their places."""
    if outline is None:
        return None
    if outline == _LEAF:
        return next(leaves)
    if outline[0] == "dict":
        return {k: filled(v, leaves) for k, v in outline[1]}
    items = [filled(v, leaves) for v in outline[-1]]
    if outline[0] == "named":
        return outline[1](*items)
    return items if outline[0] == "list" else tuple(items)


def tree_of(outline: Any) -> Any:
    """JAX's structure of an outline."""
    return jax.tree_util.tree_structure(filled(outline, iter(lambda: 0, 1)))


def outline_of_tree(tree: Any) -> Any:
    """The outline of a structure of JAX."""
    marks = [torch.empty(0, device="cpu") for _ in range(tree.num_leaves)]
    return outline_of(jax.tree_util.tree_unflatten(tree, marks), [])


def constant(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo call the function while it traces, and take the result for a constant.

    As `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn

"""Gradients of windows, whose places are run-time inputs and no part of a signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_OPS = frozenset({"aten::select_backward", "aten::slice_backward"})


def has_window(op: torch._ops.OpOverload) -> bool:
    """Return whether an op puts a gradient where its numbers say."""
    return op._schema.name in _OPS


def fits(args: Sequence[Any]) -> bool:
    """Return whether a gradient has the shape of the window; `window_fits` in the extension.

    Autograd asks for no other. A call that a user makes may be wrong, or broadcast the gradient.

    Args:
        args: Gradient, sizes of the input, dim, and an index or start, end and step.
    """
    grad, (*sizes,), dim, *places = args
    if not -len(sizes) <= dim < len(sizes):
        return False
    size = sizes[dim]
    if len(places) == 1:
        del sizes[dim]
        return -size <= places[0] < size and grad.shape == (*sizes,)
    start, end, step = places
    if step <= 0:
        return False
    sizes[dim] = len(range(size)[start:end:step])
    return grad.shape == (*sizes,)

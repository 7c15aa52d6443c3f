"""Checks of the class labels of losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from tpu_core.lowering.checks import Finding, check, fixed, out_of_range


@check("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
) -> Iterator[Finding]:
    classes = x.shape[1 if x.ndim > 1 else 0]
    yield from out_of_range(target, 0, classes, _target, target != ignore_index)


def _target(value: int) -> Exception:
    return IndexError(f"Target {value} is out of bounds.")


@check("aten.multi_margin_loss.default")
def multi_margin_loss(x: jax.Array, target: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    classes = x.shape[-1] if x.ndim else 1
    yield from out_of_range(target, 0, classes, fixed(RuntimeError, "target out of range"))


@check("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(
    x: jax.Array, target: jax.Array, *_: Any, **__: Any
) -> Iterator[Finding]:
    classes = x.shape[-1] if x.ndim else 1
    yield from out_of_range(
        target, -1, classes, fixed(RuntimeError, "argument #2 'target' is out of range")
    )

"""Graph ops that declare shardings of tensors and gradients, and when they apply."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import torch
from torch.fx import Node

from tpu_compile.aot.annotations import divide_value
from tpu_core.extend import find_lowering, register

_NAME = "tpu_compile.divided.default"
_BEHIND = "tpu_compile.behind.default"
_libraries: list[torch.library.Library] = []  # an op ends with its library


@dataclass(frozen=True)
class TensorSharding:
    """Sharding of a tensor over a mesh.

    Attributes:
        dims: The axes that divide each dimension.
        whole_over: Axes that divide none; XLA may use the others where ``dims`` has none.
        is_closed: Whether XLA may use none at all.
    """

    dims: tuple[tuple[str, ...], ...]
    whole_over: tuple[str, ...] = ()
    is_closed: bool = False


def closed(dims: Sequence[Any]) -> TensorSharding:
    """Divided by the axes of ``dims``, a spec, and no other."""
    return TensorSharding(
        tuple((a,) if isinstance(a, str) else tuple(a or ()) for a in dims), is_closed=True
    )


def divide(
    x: torch.Tensor, forward: TensorSharding, backward: TensorSharding | None
) -> torch.Tensor:
    """``x``, divided.

    Args:
        x: Traced, any shape.
        forward: Its partition spec.
        backward: Partition spec of its gradient; None leaves that to XLA.
    """
    _define()
    made: torch.Tensor = _Divide.apply(x, forward, backward)
    return made


def behind(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """``x``, which XLA must not use before ``first`` is there."""
    _define()
    made: torch.Tensor = torch.ops.tpu_compile.behind(x, first)
    return made


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, forward: TensorSharding, backward: TensorSharding | None) -> Any:
        ctx.backward_division = backward
        return _op(x, forward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        division = ctx.backward_division
        return (grad if division is None else _op(grad, division)), None, None


def _op(x: torch.Tensor, division: TensorSharding) -> torch.Tensor:
    made: torch.Tensor = torch.ops.tpu_compile.divided(x, json.dumps(asdict(division)))
    return made


@functools.cache
def _define() -> None:
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    library.define("divided(Tensor x, str division) -> Tensor")
    library.impl("divided", lambda x, division: torch.empty_like(x), "Meta")
    library.define("behind(Tensor x, Tensor first) -> Tensor")
    library.impl("behind", lambda x, first: torch.empty_like(x), "Meta")
    _libraries.append(library)
    if find_lowering(_NAME) is None:
        register(_NAME, _lower)
        register(_BEHIND, _lower_behind)


def _lower(x: jax.Array, division: str) -> jax.Array:
    wanted = json.loads(division)
    dims = tuple(tuple(axes) for axes in wanted["dims"])
    dims += ((),) * (x.ndim - len(dims))
    return divide_value(x, dims, tuple(wanted["whole_over"]), wanted["is_closed"])


def _lower_behind(x: jax.Array, first: jax.Array) -> jax.Array:
    made: jax.Array = jax.lax.optimization_barrier((x, first))[0]
    return made


def is_open(node: Node) -> bool:
    """Return whether a node of a graph says how a tensor is divided, and leaves something to
    XLA.
    """
    return str(node.target) == _NAME and not json.loads(str(node.args[1]))["is_closed"]

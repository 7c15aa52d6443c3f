"""The loss on each device's tokens, in a program that XLA divides; each has the whole weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from tpu_core.array_types import Float
from tpu_core.extend import OperandSharding, Target
from tpu_kernels.ops.cross_entropy import reference
from tpu_kernels.ops.registry import Rule
from tpu_kernels.ops.sharding_utils import Axes, dividing

HAS_TOKENS_DIVIDED = Rule(
    "The program is for one device, or divided by `tpu_compile.aot`: tokens then stay divided as "
    "they come, and weights are gathered.",
    lambda a, target: target.devices == 1 or target.division is not None,
)


def forward(
    function: Callable[..., Any], hidden: Float[Array, "tokens features"], *rest: Any
) -> Any:
    """``function(hidden, *rest)``, called on each device's tokens where there are several.

    Args:
        function: As `tpu_kernels.ops.cross_entropy.loops.forward`.
        hidden: Hidden states.
        rest: The remaining arguments.
    """
    division = Target.current().division
    if division is None:
        return function(hidden, *rest)
    weight, wanted, bias, *options = rest
    key = ("cross_entropy", hidden.shape, weight.shape)
    if not division.is_known:
        (marked,) = division.probe(key, [hidden])
        return reference.forward(marked, *rest)
    tokens = _axes(division, key, hidden)
    rows = PartitionSpec(tokens or None)
    slopes = rows if options[-1] else PartitionSpec()
    operands, specs = _present([hidden, weight, wanted, bias], [rows, None, rows, None])

    def part(*own: Any) -> Any:
        hidden, weight, wanted, *bias = own
        return function(hidden, weight, wanted, *(bias or [None]), *options)

    return _mapped(division, part, specs, (rows, rows, slopes))(*operands)


def backward(
    function: Callable[..., Any],
    grad: Float[Array, " tokens"],
    logsumexp: Float[Array, " tokens"],
    *rest: Any,
) -> Any:
    """``function(grad, logsumexp, *rest)``, likewise; the gradients are summed over devices.

    Args:
        function: As `tpu_kernels.ops.cross_entropy.loops.backward`.
        grad, logsumexp, rest: Its arguments.
    """
    division = Target.current().division
    if division is None:
        return function(grad, logsumexp, *rest)
    hidden, weight, wanted, bias, *options = rest
    key = ("gradient of cross_entropy", hidden.shape, weight.shape)
    if not division.is_known:
        (marked,) = division.probe(key, [hidden])
        return reference.backward(grad, logsumexp, marked, *rest[1:])
    tokens = _axes(division, key, hidden)
    rows = PartitionSpec(tokens or None)
    operands, specs = _present(
        [grad, logsumexp, hidden, weight, wanted, bias], [rows, rows, rows, None, rows, None]
    )

    def part(*own: Any) -> Any:
        *given, wanted = own[:5]
        made = function(*given, wanted, *(own[5:] or [None]), *options)
        return tuple(lax.psum(x, tokens) for x in made) if tokens else made

    whole = PartitionSpec()
    return _mapped(division, part, specs, (whole, whole))(*operands)


def _present(operands: Sequence[Any], specs: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The operands that there are, and how each is divided; None for whole ones."""
    pairs = [(x, s or PartitionSpec()) for x, s in zip(operands, specs) if x is not None]
    return [x for x, _ in pairs], tuple(s for _, s in pairs)


def _mapped(
    division: OperandSharding,
    part: Callable[..., Any],
    specs: tuple[Any, ...],
    made: tuple[Any, ...],
) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.shard_map(
        part,
        mesh=division.mesh,
        in_specs=specs,
        out_specs=made,
        check_vma=False,  # kernels do not say along which axes their results vary
    )
    return mapped


def _axes(division: OperandSharding, key: Any, hidden: Float[Array, "tokens features"]) -> Axes:
    """The first of the axes that divide tokens, as many as divide them evenly."""
    found = division.axes(key)
    return dividing(found[0][0] if found else (), hidden.shape[0], division.mesh.shape)

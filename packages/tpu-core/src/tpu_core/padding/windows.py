"""Rules of reductions over windows: a dim that varies is one they leave alone, or slide along."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, bind, rule, same_dims
from tpu_core.padding.layout import Dim, Padded, is_static, replaced
from tpu_core.padding.reductions import highest, lowest
from tpu_core.padding.sizes import NotPaddableError

_NEUTRAL = {"sum": lambda _: 0, "max": lowest, "min": highest}


@rule(
    *("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"),
    handles=("padding",),
)
def reduce_window(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    x, *rest = operands
    kind = eqns[0].primitive.name.removeprefix("reduce_window").removeprefix("_")
    params = eqns[0].params
    sizes = context.out(eqns)
    dims: list[Dim] = list(x.dims)
    paddings = [tuple(p) for p in params["padding"]]
    for axis in range(len(dims)):
        if _untouched(eqns, axis):
            continue
        if is_static(dims[axis]) and all(_along(e, axis) == _along(eqns[0], axis) for e in eqns):
            dims[axis] = (sizes[axis],)
            continue
        if kind not in _NEUTRAL:
            raise NotPaddableError("windows of an unknown reduction along a dim that varies")
        size, stride, low, _, base, dilation = _along(eqns[0], axis)
        if any(_along(e, axis)[:3] != (size, stride, low) for e in eqns):
            raise NotPaddableError("windows whose place depends on a size")
        x = context.space.as_prefix(x, axis)
        x = Padded(context.space.mask(x, [axis], _NEUTRAL[kind](x.array.dtype)), x.dims)
        dims[axis] = (sizes[axis],)
        # What counts ends in what changes nothing, so that any length will do after it.
        reach = (context.space.padded(sizes[axis]) - 1) * stride + (size - 1) * dilation + 1
        paddings[axis] = (low, reach - low - ((x.array.shape[axis] - 1) * base + 1))
    arrays = [x.array, *(r.array for r in rest)]
    return [Padded(r, tuple(dims)) for r in bind(eqns[0], arrays, padding=tuple(paddings))]


def _along(eqn: JaxprEqn, axis: int) -> tuple[int, ...]:
    """Windows along a dim: size, stride, padding before and after, dilation of base and window."""
    params, ones = eqn.params, [1] * (axis + 1)
    return (
        params["window_dimensions"][axis],
        params["window_strides"][axis],
        *params["padding"][axis],
        (params.get("base_dilation") or ones)[axis],
        (params.get("window_dilation") or ones)[axis],
    )


@rule("select_and_scatter_add")
def select_and_scatter_add(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    source, operand = operands
    for axis, dim in enumerate(operand.dims):
        if not is_static(dim) and not _untouched(eqns, axis):
            raise NotPaddableError("windows that step along a dim that varies")
        if is_static(dim):
            continue
        source = context.space.relayout(source, replaced(source.dims, axis, dim))
    (array,) = bind(eqns[0], [source.array, operand.array])
    return [Padded(array, operand.dims)]


@rule("select_and_gather_add")
def select_and_gather_add(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    tangents, operand = same_dims(context, operands)
    sizes = context.out(eqns)
    for axis, dim in enumerate(operand.dims):
        if not is_static(dim) and not _untouched(eqns, axis):
            raise NotPaddableError("windows that step along a dim that varies")
    dims = tuple((s,) if is_static(d) else d for s, d in zip(sizes, operand.dims))
    return [Padded(r, dims) for r in bind(eqns[0], [tangents.array, operand.array])]


def _untouched(eqns: list[JaxprEqn], axis: int) -> bool:
    """Return whether each window along a dim is one element, in place."""
    return all(_along(e, axis) == (1, 1, 0, 0, 1, 1) for e in eqns)

"""Rules of reductions over windows: a dim that varies is one they leave alone, or slide along."""

from __future__ import annotations

from jax import lax
from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import Context, bind, rule, same_dims
from tpu_core.padding.layout import Dim, Padded, is_static, replaced
from tpu_core.padding.reductions import highest, lowest
from tpu_core.padding.sizes import Unpaddable

_NEUTRAL = {"sum": lambda _: 0, "max": lowest, "min": highest}


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
def reduce_window(context: Context, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x, *rest = operands
    kind = eqns[0].primitive.name.removeprefix("reduce_window").removeprefix("_")
    sizes = context.out(eqns)
    dims: list[Dim] = list(x.dims)
    lengths: dict[int, int] = {}
    for axis in range(len(dims)):
        if is_static(dims[axis]):
            dims[axis] = (sizes[axis],)
            continue
        if _untouched(eqns, axis):
            continue
        params = eqns[0].params
        if kind not in _NEUTRAL or params["window_strides"][axis] != 1:
            raise Unpaddable("windows that step along a dim that varies")
        if params["base_dilation"][axis] != 1 or any(
            e.params["padding"][axis] != params["padding"][axis] for e in eqns
        ):
            raise Unpaddable("windows whose place depends on a size")
        x = context.space.as_prefix(x, axis)
        x = Padded(context.space.mask(x, [axis], _NEUTRAL[kind](x.array.dtype)), x.dims)
        dims[axis] = (sizes[axis],)
        lengths[axis] = context.space.padded(sizes[axis])
    (array,) = bind(eqns[0], [x.array, *(r.array for r in rest)])
    for axis, length in lengths.items():
        if array.shape[axis] < length:
            raise Unpaddable("windows whose results outgrow their padding")
        array = lax.slice_in_dim(array, 0, length, axis=axis)
    return [Padded(array, tuple(dims))]


@rule("select_and_scatter_add")
def select_and_scatter_add(
    context: Context, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    source, operand = operands
    for axis, dim in enumerate(operand.dims):
        if not is_static(dim) and not _untouched(eqns, axis):
            raise Unpaddable("windows that step along a dim that varies")
        if is_static(dim):
            continue
        source = context.space.relayout(source, replaced(source.dims, axis, dim))
    (array,) = bind(eqns[0], [source.array, operand.array])
    return [Padded(array, operand.dims)]


@rule("select_and_gather_add")
def select_and_gather_add(
    context: Context, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    tangents, operand = same_dims(context, operands)
    sizes = context.out(eqns)
    for axis, dim in enumerate(operand.dims):
        if not is_static(dim) and not _untouched(eqns, axis):
            raise Unpaddable("windows that step along a dim that varies")
    dims = tuple((s,) if is_static(d) else d for s, d in zip(sizes, operand.dims))
    return [Padded(r, dims) for r in bind(eqns[0], [tangents.array, operand.array])]


def _untouched(eqns: list[JaxprEqn], axis: int) -> bool:
    """Whether each window along a dim is one element, in place."""
    for e in eqns:
        dilation = e.params.get("base_dilation") or [1] * (axis + 1)
        if e.params["window_dimensions"][axis] != 1 or e.params["window_strides"][axis] != 1:
            return False
        if tuple(e.params["padding"][axis]) != (0, 0) or dilation[axis] != 1:
            return False
    return True

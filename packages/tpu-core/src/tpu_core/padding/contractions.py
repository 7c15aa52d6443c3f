"""Rules of dots and convolutions: padding is zero in what is summed over."""

from __future__ import annotations

from jax import lax
from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import Context, bind, rule
from tpu_core.padding.layout import Dim, Padded, is_static, replaced
from tpu_core.padding.sizes import Unpaddable


@rule("dot_general")
def dot_general(context: Context, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    (left_sum, right_sum), (left_batch, right_batch) = eqns[0].params["dimension_numbers"]
    left, right = operands
    for i, j in (*zip(left_sum, right_sum), *zip(left_batch, right_batch)):
        left, right = _same_dim(context, left, i, right, j)
    space = context.space
    # Zero times a NaN of the padding is NaN: both sides.
    arrays = [space.mask(left, left_sum, 0), space.mask(right, right_sum, 0)]
    dims = [left.dims[i] for i in left_batch]
    dims += [d for i, d in enumerate(left.dims) if i not in (*left_sum, *left_batch)]
    dims += [d for i, d in enumerate(right.dims) if i not in (*right_sum, *right_batch)]
    return [Padded(r, tuple(dims)) for r in bind(eqns[0], arrays)]


def _same_dim(
    context: Context, left: Padded, i: int, right: Padded, j: int
) -> tuple[Padded, Padded]:
    """Both operands with one layout of the dims that are matched."""
    have, want = left.dims[i], right.dims[j]
    if have == want:
        return left, right
    if (len(have), not is_static(have)) >= (len(want), not is_static(want)):
        return left, context.space.relayout(right, replaced(right.dims, j, have))
    return context.space.relayout(left, replaced(left.dims, i, want)), right


@rule("conv_general_dilated")
def convolution(context: Context, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    left, right = operands
    params = eqns[0].params
    numbers = params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    out_feature, in_feature, *window = numbers.rhs_spec
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    if grouped and not (is_static(left.dims[feature]) and is_static(right.dims[out_feature])):
        raise Unpaddable("a grouped convolution over a dim that varies")
    if params["batch_group_count"] != 1 and not is_static(left.dims[batch]):
        raise Unpaddable("a grouped convolution over a dim that varies")
    if not grouped:
        left, right = _same_dim(context, left, feature, right, in_feature)
    for i, (a, b) in enumerate(zip(spatial, window)):
        left, right = context.space.as_prefix(left, a), context.space.as_prefix(right, b)
        if is_static(left.dims[a]) and is_static(right.dims[b]):
            continue
        if params["lhs_dilation"][i] != 1:
            raise Unpaddable("a transposed convolution along a dim that varies")
    if any(e.params["padding"] != params["padding"] for e in eqns[1:]):
        raise Unpaddable("a convolution whose padding depends on a size")
    arrays = [
        context.space.mask(left, [feature, *spatial], 0),
        context.space.mask(right, [in_feature, *window], 0),
    ]
    sizes = context.out(eqns)
    out_batch, out_channel, *out_spatial = numbers.out_spec
    dims: list[Dim] = [()] * len(sizes)
    dims[out_batch], dims[out_channel] = left.dims[batch], right.dims[out_feature]
    (array,) = bind(eqns[0], arrays)
    for axis in out_spatial:
        dims[axis] = (sizes[axis],)
        length = context.space.padded(sizes[axis])
        if array.shape[axis] < length:
            raise Unpaddable("a convolution whose result outgrows its padding")
        array = lax.slice_in_dim(array, 0, length, axis=axis)
    return [Padded(array, tuple(dims))]

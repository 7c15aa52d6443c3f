"""Rules of dots and convolutions: padding is zero in what is summed over."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, bind, rule
from tpu_core.padding.layout import Dim, Padded, is_static, replaced
from tpu_core.padding.sizes import NotPaddableError


@rule("dot_general")
def dot_general(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
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


@rule("ragged_dot_general")
def ragged_dot_general(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    """Padding is in no group, whose sizes are values: it is not read."""
    numbers = eqns[0].params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, _) = numbers.dot_dimension_numbers
    left, right, sizes = operands
    if left_batch or not is_static(sizes.dims[0]):
        raise NotPaddableError("a grouped product whose number of groups varies")
    for i, j in zip(left_sum, right_sum):
        left, right = _same_dim(context, left, i, right, j)
    space, (ragged,) = context.space, numbers.lhs_ragged_dimensions
    left = space.as_prefix(left, ragged)
    if ragged in left_sum:
        right = space.as_prefix(right, right_sum[left_sum.index(ragged)])
    arrays = [space.mask(left, left_sum, 0), space.mask(right, right_sum, 0), sizes.array]
    dims = [sizes.dims[0]] if ragged in left_sum else []
    dims += [d for i, d in enumerate(left.dims) if i not in left_sum]
    rest = (*right_sum, *numbers.rhs_group_dimensions)
    dims += [d for i, d in enumerate(right.dims) if i not in rest]
    return [Padded(r, tuple(dims)) for r in bind(eqns[0], arrays)]


def _same_dim(
    context: PaddingContext, left: Padded, i: int, right: Padded, j: int
) -> tuple[Padded, Padded]:
    """Both operands with one layout of the dims that are matched."""
    have, want = left.dims[i], right.dims[j]
    if have == want:
        return left, right
    if (len(have), not is_static(have)) >= (len(want), not is_static(want)):
        return left, context.space.relayout(right, replaced(right.dims, j, have))
    return context.space.relayout(left, replaced(left.dims, i, want)), right


@rule("conv_general_dilated", handles=("padding",))
def convolution(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    left, right = operands
    params = eqns[0].params
    numbers = params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    out_feature, in_feature, *window = numbers.rhs_spec
    # The dims that groups divide; what each group sums over may vary.
    divided = [left.dims[feature]] if params["feature_group_count"] != 1 else []
    divided += [left.dims[batch]] if params["batch_group_count"] != 1 else []
    divided += [right.dims[out_feature]] if divided else []
    if not all(map(is_static, divided)):
        raise NotPaddableError("a grouped convolution over a dim that varies")
    if params["feature_group_count"] == 1:
        left, right = _same_dim(context, left, feature, right, in_feature)
    sizes = context.out(eqns)
    out_batch, out_channel, *out_spatial = numbers.out_spec
    dims: list[Dim] = [()] * len(sizes)
    paddings = []
    for i, (a, b) in enumerate(zip(spatial, window)):
        left, right = context.space.as_prefix(left, a), context.space.as_prefix(right, b)
        before, after = zip(*(e.params["padding"][i] for e in eqns))
        if any(n != before[0] for n in before):
            raise NotPaddableError("a convolution that starts where a size says")
        # What counts ends in zeros on both sides, so that any length will do after it.
        size = sizes[out_spatial[i]]
        dims[out_spatial[i]] = (size,)
        reach = (context.space.padded(size) - 1) * params["window_strides"][i] + 1
        reach += (right.array.shape[b] - 1) * params["rhs_dilation"][i]
        reach -= (left.array.shape[a] - 1) * params["lhs_dilation"][i] + 1
        alike = is_static(left.dims[a]) and is_static(right.dims[b]) and len(set(after)) == 1
        paddings.append((before[0], after[0] if alike else reach - before[0]))
    arrays = [
        context.space.mask(left, [feature, *spatial], 0),
        context.space.mask(right, [in_feature, *window], 0),
    ]
    for axis, dim in ((out_batch, left.dims[batch]), (out_channel, right.dims[out_feature])):
        dims[axis] = (sizes[axis],) if is_static(dim) else dim  # groups divide a static one
    return [Padded(r, tuple(dims)) for r in bind(eqns[0], arrays, padding=tuple(paddings))]

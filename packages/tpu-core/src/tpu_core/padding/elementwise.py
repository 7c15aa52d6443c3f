"""Rules of primitives that work element by element: padding stays where it is."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, bind, joined_dims, rule, same_dims
from tpu_core.padding.layout import Padded

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
polygamma population_count pow random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
""".split()


@rule(*_NAMES)
def elementwise(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    shaped = [x for x in operands if x.dims]
    dims = joined_dims(shaped)
    aligned = iter(same_dims(context, shaped))
    inputs = [next(aligned) if x.dims else x for x in operands]
    return [Padded(r, dims) for r in bind(eqns[0], [x.array for x in inputs])]


@rule("optimization_barrier")
def barrier(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    results = bind(eqns[0], [x.array for x in operands])
    return [Padded(r, x.dims) for r, x in zip(results, operands)]

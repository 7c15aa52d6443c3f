"""Parameters of primitives: a rule handles those that it declares, and any other must be equal."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

import tpu_core.padding.padded_module  # noqa: F401  # its import registers the rules
from tpu_core.padding.fit import Fit
from tpu_core.padding.interpret import HANDLED, RULES, PaddingContext, _apply
from tpu_core.padding.layout import Padded, Space
from tpu_core.padding.sizes import NotPaddableError, static

SIZES = (5, 7)


def _examples(n: int) -> ClosedJaxpr:
    """A trace that holds each primitive of the rules that has parameters."""
    shapes = [(n, 4), (n, 2, 6, 6), (2, 2, 3, 3), (2, 4, 3)]
    floats = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    integers = [jax.ShapeDtypeStruct(shape, np.int32) for shape in ((n, 1), (2,))]
    return jax.make_jaxpr(functools.partial(_example, n))(*floats, *integers)


def _example(
    n: int,
    x: jax.Array,
    image: jax.Array,
    kernel: jax.Array,
    experts: jax.Array,
    i: jax.Array,
    groups: jax.Array,
) -> list[Any]:
    square, linalg = x @ x.T, lax.linalg
    windows = ((2, 1), (2, 1), "VALID")

    def looped(x: jax.Array) -> Any:
        def both(x: jax.Array) -> jax.Array:
            return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

        y, _ = lax.scan(lambda c, row: (c + row, None), x[0], x)
        return lax.while_loop(lambda v: v[0, 0] > 0, lambda v: v - 1, both(x)) + y

    functions = [
        lambda: [
            getattr(lax, f"reduce_{k}_p").bind(x, axes=(0,), out_sharding=None)
            for k in ("sum", "prod", "max", "min")
        ],
        lambda: [
            getattr(lax, f"reduce_{k}_p").bind(x.astype(bool), axes=(0,))
            for k in ("or", "and", "xor")
        ],
        lambda: (lax.argmax(x, 0, np.int32), lax.argmin(x, 0, np.int32)),
        lambda: (lax.cumsum(x), lax.cumprod(x), lax.cummax(x), lax.cummin(x), lax.cumlogsumexp(x)),
        lambda: (lax.sort(x, dimension=0), lax.top_k(x.T, 2)),
        lambda: lax.dot_general(x, x, (((0,), (0,)), ((), ()))),
        lambda: lax.ragged_dot(x, experts, groups),
        lambda: lax.conv_general_dilated(image, kernel, (1, 1), "SAME"),
        lambda: lax.reduce_window(x, 0.0, lax.add, *windows),
        lambda: lax.reduce_window(x, -jnp.inf, lax.max, *windows),
        lambda: lax.reduce_window(x, jnp.inf, lax.min, *windows),
        lambda: lax.reduce_window(x, 1.0, lambda a, b: a * b + 0, (1, 2), (1, 2), "VALID"),
        lambda: jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *windows).sum())(x),
        lambda: jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *windows), (x,), (x,)),
        lambda: lax.slice(x, (1, 0), (n, 4), (1, 1)),
        lambda: lax.dynamic_slice(x, (i[0, 0], i[0, 0]), (2, 4)),
        lambda: lax.dynamic_update_slice(x, x[:2], (i[0, 0], i[0, 0])),
        lambda: x[i[:, 0]],
        lambda: (x.at[i[:, 0]].set(x), x.at[i[:, 0]].add(x), x.at[i[:, 0]].multiply(x)),
        lambda: (x.at[i[:, 0]].min(x), x.at[i[:, 0]].max(x)),
        lambda: lax.broadcast_in_dim(x, (2, n, 4), (1, 2)),
        lambda: (lax.squeeze(i, (1,)), lax.transpose(x, (1, 0)), lax.reshape(x, (4 * n,))),
        lambda: (lax.broadcasted_iota(np.int32, (n, 4), 0), lax.rev(x, (0,))),
        lambda: (lax.concatenate([x, x], 0), lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0)))),
        lambda: jnp.stack([x, x], 1),
        lambda: lax.split(x, (2, 2), axis=1),
        lambda: (linalg.cholesky(square), linalg.lu(square), linalg.triangular_solve(square, x.T)),
        lambda: (linalg.qr(x, full_matrices=False), linalg.svd(x, compute_uv=False)),
        lambda: (linalg.lu_pivots_to_permutation(i[:, 0], n), jnp.linalg.solve(square, x[:, 0])),
        lambda: (linalg.eigh(square), lax.fft(x, "RFFT", (4,))),
        lambda: looped(x),
        lambda: (lax.integer_pow(x, 3), lax.convert_element_type(x, np.int32), jnp.exp(x)),
        lambda: (
            lax.reduce_precision(x, 5, 10),
            lax.round(x),
            lax.bitcast_convert_type(x, np.int32),
        ),
        lambda: (lax.optimization_barrier(x), lax.select_n(x > 0, x, x), x + x),
    ]
    return [function() for function in functions]


def _equations(traced: Any) -> Iterator[JaxprEqn]:
    jaxpr = traced.jaxpr if isinstance(traced, ClosedJaxpr) else traced
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(part, (ClosedJaxpr, Jaxpr)):
                    yield from _equations(part)


EQUATIONS: dict[str, JaxprEqn] = {}
for _eqn in _equations(_examples(SIZES[0])):
    EQUATIONS.setdefault(_eqn.primitive.name, _eqn)

# Rules of primitives without parameters, and other names of one.
_NO_PARAMETERS = set(
    """
    abs acos acosh add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e ceil clamp clz complex
    conj copy copy_p cos cosh digamma div eq erf erf_inv erfc floor ge gt igamma igamma_grad_a
    igammac imag is_finite le lgamma lt max min mul ne neg nextafter not or and polygamma
    population_count pow random_gamma_grad real regularized_incomplete_beta rem cbrt exp2 expm1 log
    log1p logistic rsqrt sqrt tan tanh sin cos shift_left shift_right_arithmetic
    shift_right_logical sign sinh square stop_gradient sub threefry2x32 xor zeta
    """.split()
)
_SAME_AS = {
    "stack": "concatenate",  # before jax 0.10
    **{f"scatter-{k}": f"scatter_{k}" for k in ("add", "mul", "min", "max")},
    **{f"scatter_{k}": f"scatter-{k}" for k in ("add", "mul", "min", "max")},
}


def test_each_rule_with_parameters_has_an_example():
    missing = {
        name
        for name in RULES
        if name not in EQUATIONS
        and _SAME_AS.get(name) not in EQUATIONS
        and name not in _NO_PARAMETERS
    }
    assert not missing


def _changed(value: Any) -> Any:
    """Another value of the kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, np.integer)):
        return value + 1
    if isinstance(value, float):
        return value + 1.0
    if isinstance(value, str):
        return value + "x"
    if type(value) is tuple and value:
        return (_changed(value[0]), *value[1:])
    return object()


def _parameters() -> Iterator[tuple[str, str]]:
    for name, eqn in EQUATIONS.items():
        if name in RULES:
            for parameter in eqn.params.keys() - HANDLED[name]:
                yield name, parameter


@pytest.mark.parametrize(("name", "parameter"), sorted(_parameters()))
def test_a_parameter_that_differs_is_refused_unless_handled(name, parameter):
    eqn = EQUATIONS[name]
    other = eqn.replace(params={**eqn.params, parameter: _changed(eqn.params[parameter])})
    fit = Fit([[n] for n in SIZES])
    layouts = [
        tuple((fit.sizes[0] if n == SIZES[0] else static(n),) for n in v.aval.shape)
        for v in eqn.invars
    ]

    def apply(size: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        context = PaddingContext(fit, Space([size], (8,)))
        operands = [Padded(x, dims) for x, dims in zip(arrays, layouts)]
        return [x.array for x in _apply(context, [eqn, other], operands)]

    avals = [
        jax.ShapeDtypeStruct([8 if n == SIZES[0] else n for n in v.aval.shape], v.aval.dtype)
        for v in eqn.invars
    ]
    with pytest.raises(NotPaddableError, match=f"'{parameter}' of '{name}'"):
        jax.eval_shape(apply, jax.ShapeDtypeStruct((), np.int32), *avals)


@pytest.mark.parametrize("name", sorted(RULES))
def test_handled_parameters_exist(name):
    eqn = EQUATIONS.get(name) or EQUATIONS.get(_SAME_AS.get(name, ""))
    assert HANDLED[name] <= (set(eqn.params) if eqn is not None else set())

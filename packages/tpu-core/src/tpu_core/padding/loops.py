"""Rules of loops and branches: their bodies run on padded arrays, as often as the sizes say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from tpu_core.padding.interpret import PaddingContext, rule, run
from tpu_core.padding.layout import Dim, Padded
from tpu_core.padding.sizes import NotPaddableError, Size
from tpu_core.pjrt.jax_compat import parts_of_scan

Layout = tuple[Dim, ...]


class _Body:
    """A function of the trace, called inside a JAX loop with padded arrays of fixed layouts.

    Args:
        context: PaddingContext of the rules.
        traces: The function, one a recording.
        consts: Its first operands, which are the same in each call.
        layouts: The layouts of its other operands.
    """

    def __init__(
        self,
        context: PaddingContext,
        traces: Sequence[ClosedJaxpr],
        consts: Sequence[Padded],
        layouts: Sequence[Layout],
    ) -> None:
        self._context, self._traces = context, traces
        self._consts, self._layouts = list(consts), list(layouts)

    def __call__(self, arrays: Sequence[jax.Array], wanted: Sequence[Layout] = ()) -> list[Padded]:
        """The results, the first of them in the layouts ``wanted``."""
        operands = [Padded(x, dims) for x, dims in zip(arrays, self._layouts, strict=True)]
        results = run(self._context, self._traces, [*self._consts, *operands])
        relayout = self._context.space.relayout
        return [relayout(x, wanted[i]) if i < len(wanted) else x for i, x in enumerate(results)]

    def results(self, arrays: Sequence[Any]) -> list[Padded]:
        """Results of a call, with shapes and dtypes in place of arrays."""
        layouts: list[Layout] = []

        def call(*values: jax.Array) -> list[jax.Array]:
            found = self(values)
            layouts[:] = [x.dims for x in found]
            return [x.array for x in found]

        shapes = jax.eval_shape(call, *arrays)
        return [Padded(x, dims) for x, dims in zip(shapes, layouts)]


def _split(items: Sequence[Any], *lengths: int) -> list[list[Any]]:
    parts, start = [], 0
    for n in lengths:
        parts.append(list(items[start : start + n]))
        start += n
    return [*parts, list(items[start:])]


def _layouts(values: Sequence[Padded]) -> list[Layout]:
    return [x.dims for x in values]


def _arrays(values: Sequence[Padded]) -> list[jax.Array]:
    return [x.array for x in values]


@rule("while", handles=("cond_jaxpr", "body_jaxpr"))
def while_loop(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    params = eqns[0].params
    tests, steps, carry = _split(operands, params["cond_nconsts"], params["body_nconsts"])
    layouts = _layouts(carry)
    test = _Body(context, [e.params["cond_jaxpr"] for e in eqns], tests, layouts)
    step = _Body(context, [e.params["body_jaxpr"] for e in eqns], steps, layouts)
    results = lax.while_loop(
        lambda state: test(state)[0].array,
        lambda state: _arrays(step(state, layouts)),
        _arrays(carry),
    )
    return [Padded(r, dims) for r, dims in zip(results, layouts)]


@rule("cond", handles=("branches",))
def cond(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    index, *rest = operands
    if len({len(e.params["branches"]) for e in eqns}) > 1:
        raise NotPaddableError("its ops depend on a size")
    bodies = [
        _Body(context, traces, [], _layouts(rest))
        for traces in zip(*(e.params["branches"] for e in eqns))
    ]
    layouts = _layouts(bodies[0].results(_arrays(rest)))

    def branch(body: _Body) -> Callable[..., list[jax.Array]]:
        return lambda *arrays: _arrays(body(arrays, layouts))

    results = lax.switch(index.array, [branch(b) for b in bodies], *_arrays(rest))
    return [Padded(r, dims) for r, dims in zip(results, layouts)]


@rule("custom_linear_solve", handles=("jaxprs",))
def custom_linear_solve(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    """The solver; the functions beside it are for derivatives, which are taken by now."""
    counts = eqns[0].params["const_lengths"]
    parts = _split(operands, counts.matvec, counts.vecmat, counts.solve, counts.transpose_solve)
    return run(context, [e.params["jaxprs"].solve for e in eqns], [*parts[2], *parts[4]])


@rule("scan", handles=("length", "jaxpr"))
def scan(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    params = eqns[0].params
    length = context.size([e.params["length"] for e in eqns])
    consts, carry, xs = parts_of_scan(eqns[0], operands)
    xs = [context.space.as_prefix(x, 0) for x in xs]
    layouts = _layouts(carry)
    body = _Body(
        context, [e.params["jaxpr"] for e in eqns], consts, [*layouts, *(x.dims[1:] for x in xs)]
    )
    slices = [jax.ShapeDtypeStruct(x.array.shape[1:], x.array.dtype) for x in xs]
    made = body.results([*_arrays(carry), *slices])[len(carry) :]

    def step(state: list[jax.Array], x: list[jax.Array]) -> tuple[Any, Any]:
        results = _arrays(body([*state, *x], layouts))
        return results[: len(state)], results[len(state) :]

    reverse = params["reverse"]
    if length.is_static:
        state, ys = lax.scan(step, _arrays(carry), _arrays(xs), length.offset, reverse)
    else:
        state, ys = _counted(context, step, _arrays(carry), _arrays(xs), made, length, reverse)
    return [
        *(Padded(r, dims) for r, dims in zip(state, layouts)),
        *(Padded(r, ((length,), *y.dims)) for r, y in zip(ys, made)),
    ]


def _counted(
    context: PaddingContext,
    step: Callable[[list[jax.Array], list[jax.Array]], tuple[Any, Any]],
    carry: list[jax.Array],
    xs: list[jax.Array],
    made: list[Padded],
    length: Size,
    reverse: bool,
) -> Any:
    """As many iterations as the size that counts: none of them sees padding, or takes its time."""
    space = context.space
    count = jnp.asarray(space.actual(length), np.int32)
    room = space.padded(length)

    def iteration(i: jax.Array, state: Any) -> Any:
        carried, ys = state
        place = count - 1 - i if reverse else i
        x = [lax.dynamic_index_in_dim(x, place, keepdims=False) for x in xs]
        carried, new = step(carried, x)
        return carried, [
            lax.dynamic_update_index_in_dim(y, value, place, 0) for y, value in zip(ys, new)
        ]

    ys = [jnp.zeros((room, *y.array.shape), y.array.dtype) for y in made]
    return lax.fori_loop(np.int32(0), count, iteration, (carry, ys))

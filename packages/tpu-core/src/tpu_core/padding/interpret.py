"""Running a segment's JAX function on padded arrays.

The function was traced for each recording. The traces are walked side by side, equation by
equation; what is equal in all is static, what differs follows from the sizes that vary. An equation
none of whose operands is padded is evaluated as it stands; another is handed to the rule of its
primitive, which makes sure that padding never reaches an element that counts. A rule declares the
parameters that it handles: any other that differs between the traces is refused, in `_apply`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from tpu_core.padding.fit import Fit
from tpu_core.padding.jaxpr_signature import exact_signature
from tpu_core.padding.layout import Dim, Padded, Space, is_static, whole
from tpu_core.padding.sizes import NotPaddableError, Size, static

Rule = Callable[["PaddingContext", list[JaxprEqn], list[Padded]], list[Padded]]
RULES: dict[str, Rule] = {}
# Of each rule the parameters of its primitive that may differ between the traces.
HANDLED: dict[str, frozenset[str]] = {}

_ONE: Dim = (static(1),)
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat"}
_CALLS |= {"checkpoint", "custom_vjp_call_jaxpr", "custom_lin"}


def shape_of(variable: Any) -> tuple[int, ...]:
    """Shape of a variable of a trace."""
    return variable.aval.shape


def rule(*names: str, handles: Sequence[str] = ()) -> Callable[[Rule], Rule]:
    """Register a function as the rule of primitives.

    Args:
        names: The primitives.
        handles: Parameters of theirs that may differ between the traces, as they follow from sizes
            and the rule works them out. Any other that differs is refused before the rule is asked.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
            HANDLED[name] = frozenset(handles)
        return function

    return register


class PaddingContext:
    """Context of padding rules: sizes by their recorded values, and the program's space."""

    def __init__(self, fit: Fit, space: Space) -> None:
        self._fit = fit
        self.space = space

    def size(self, seen: Sequence[int]) -> Size:
        """The size that was ``seen`` in the recordings."""
        size = self._fit.derive([int(n) for n in seen])
        if size is None:
            raise NotPaddableError(f"a size that was {', '.join(map(str, seen))} follows no other")
        return size

    def sizes(self, seen: Sequence[Sequence[int]]) -> tuple[Size, ...]:
        """The sizes of a shape, given as one shape a recording."""
        return tuple(self.size(n) for n in zip(*seen, strict=True))

    def out(self, eqns: list[JaxprEqn], index: int = 0) -> tuple[Size, ...]:
        """The sizes of an equation's result."""
        return self.sizes([shape_of(e.outvars[index]) for e in eqns])

    def prefix(self, array: jax.Array, sizes: Sequence[Size]) -> Padded:
        """An array of these sizes, each dim's padding at its end."""
        return Padded(array, tuple((s,) for s in sizes))

    def number(self, seen: Sequence[Any]) -> jax.Array:
        """A constant that differs among the recordings, at run time."""
        dtype = np.asarray(seen[0]).dtype
        values = [np.asarray(v) for v in seen]
        if any(v.ndim for v in values):
            raise NotPaddableError("a constant array depends on a size")
        if dtype.kind == "c":
            parts = ([v.real for v in values], [v.imag for v in values])
            return lax.complex(*(self._same_or_number(part) for part in parts))
        numbers = [v.item() for v in values]
        known = self._fit.follow(numbers, dtype)
        if known is None or not known.factors:
            raise NotPaddableError(
                f"a constant that was {', '.join(map(str, numbers))} follows no size"
            )
        sizes = [jnp.asarray(self.space.actual(size)) for size in known.factors]
        actual = functools.reduce(jnp.multiply, sizes) + known.offset
        if known.numerator is None and known.divisor == 1:
            return actual.astype(dtype)
        if known.numerator is None:
            return (actual.astype(np.float64) / known.divisor).astype(dtype)
        count = actual.astype(np.float64)
        return (known.numerator / (jnp.sqrt(count) if known.root else count)).astype(dtype)

    def _same_or_number(self, seen: Sequence[Any]) -> jax.Array:
        is_same = all(_same(seen[0], v) for v in seen[1:])
        return jnp.asarray(seen[0]) if is_same else self.number(seen)


def run(
    context: PaddingContext, traces: Sequence[ClosedJaxpr], inputs: Sequence[Padded]
) -> list[Padded]:
    """The results of the traced function.

    Raises:
        NotPaddableError: The traces differ in more than sizes, or an equation has no rule.
    """
    consts: list[Padded | None] = []
    if any(len(t.consts) != len(traces[0].consts) for t in traces):
        raise NotPaddableError("its ops depend on a size")
    for values in zip(*(t.consts for t in traces), strict=True):
        first = np.asarray(values[0])
        is_same = all(_same(first, v) for v in values[1:])
        consts.append(whole(jnp.asarray(first)) if is_same else None)
    return _run(context, [t.jaxpr for t in traces], consts, inputs)


def _run(
    context: PaddingContext,
    traces: list[Jaxpr],
    consts: Sequence[Padded | None],
    inputs: Sequence[Padded],
) -> list[Padded]:
    """`run` of jaxprs; a constant array that the traces differ in is None."""
    first, *others = traces
    if any(len(t.eqns) != len(first.eqns) for t in others):
        raise NotPaddableError("its ops depend on a size")
    values: dict[Any, Padded | None] = {}
    twins: dict[Any, tuple[Any, ...]] = {}

    def write(atoms: tuple[Any, ...], value: Padded | None) -> None:
        values[atoms[0]], twins[atoms[0]] = value, atoms[1:]

    def read(atoms: tuple[Any, ...]) -> Padded:
        if all(isinstance(a, Literal) for a in atoms):
            constants = [a.val for a in atoms]
            if all(_same(constants[0], c) for c in constants[1:]):
                return whole(jnp.asarray(constants[0], atoms[0].aval.dtype))
            return whole(context.number([np.asarray(c, atoms[0].aval.dtype) for c in constants]))
        if any(isinstance(a, Literal) for a in atoms) or twins[atoms[0]] != atoms[1:]:
            raise NotPaddableError("its ops depend on a size")
        if (value := values[atoms[0]]) is None:
            raise NotPaddableError("a constant array depends on a size")
        return value

    for atoms, value in zip(zip(*(t.constvars for t in traces)), consts):
        write(atoms, value)
    for atoms, value in zip(zip(*(t.invars for t in traces)), inputs):
        write(atoms, value)
    for eqns in zip(*(t.eqns for t in traces)):
        equations = list(eqns)
        name = equations[0].primitive.name
        if any(e.primitive.name != name or len(e.invars) != len(eqns[0].invars) for e in equations):
            raise NotPaddableError("its ops depend on a size")
        try:
            operands = [read(atoms) for atoms in zip(*(e.invars for e in equations))]
            with jax.named_scope(str(equations[0].source_info.name_stack)):
                results = _apply(context, equations, operands)
        except NotPaddableError as error:
            # Inside a function that is called, equations do not know; the call does.
            scope = str(equations[0].source_info.name_stack)
            error.op = error.op or re.sub(r"#\d+", "", scope)  # nodes' numbers say nothing
            raise
        for atoms, value in zip(zip(*(e.outvars for e in equations)), results):
            write(atoms, value)
    return [read(atoms) for atoms in zip(*(t.outvars for t in traces))]


def _same(a: Any, b: Any) -> bool:
    """Return whether two constants are the same bits: 0.0 is not -0.0."""
    if a is b:
        return True
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _apply(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    eqn = eqns[0]
    name = eqn.primitive.name
    if name in _CALLS:
        bodies = [body_of(e) for e in eqns]
        return run(context, bodies, operands)
    unpadded = all(x.is_static for x in operands)
    alike = all(
        shape_of(e.outvars[i]) == shape_of(v) for e in eqns for i, v in enumerate(eqn.outvars)
    )
    differing = sorted({p for e in eqns[1:] for p in different_params(eqn, e)})
    if unpadded and alike and not differing:
        return [whole(r) for r in bind(eqn, [x.array for x in operands])]
    if name not in RULES:
        raise NotPaddableError(f"'{name}' has no rule for padded operands")
    for parameter in differing:
        if parameter not in HANDLED[name]:
            raise NotPaddableError(f"the parameter '{parameter}' of '{name}' depends on a size")
    results = RULES[name](context, eqns, operands)
    for i, result in enumerate(results):
        expected = context.out(eqns, i)
        lengths = tuple(context.space.length(d) for d in result.dims)
        if len(expected) != len(result.dims) or result.array.shape != lengths:
            raise NotPaddableError(f"'{name}' gave {result.array.shape}, not {lengths}")
    return results


def body_of(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function that a call equation calls."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(key)
        if body is not None:
            return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
    raise NotPaddableError(f"'{eqn.primitive.name}' has no body")


def bind(eqn: JaxprEqn, arrays: Sequence[jax.Array], **changed: Any) -> list[jax.Array]:
    """Evaluate an equation's primitive on other operands, with some parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*arrays, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def different_params(a: JaxprEqn, b: JaxprEqn) -> list[str]:
    """Names of the parameters in which two equations of one primitive differ."""
    missing = object()
    return [
        name
        for name in sorted(a.params.keys() | b.params.keys())
        if not _same_param(a.params.get(name, missing), b.params.get(name, missing))
    ]


def _same_param(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (ClosedJaxpr, Jaxpr)):
        return exact_signature(a) == exact_signature(b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same_param, a, b))
    if isinstance(a, (float, complex, np.ndarray, np.generic, jax.Array)):
        return _same(a, b)
    return bool(a == b)


def joined_dims(xs: Sequence[Padded]) -> tuple[Dim, ...]:
    """The layout that operands of one logical shape have in common; dims of 1 are broadcast."""
    return tuple(
        max((x.dims[axis] for x in xs), key=lambda d: (d != _ONE, len(d), not is_static(d)))
        for axis in range(len(xs[0].dims))
    )


def same_dims(context: PaddingContext, xs: Sequence[Padded]) -> list[Padded]:
    """Operands of one logical shape, brought to the same layout; dims of 1 stay."""
    dims = joined_dims(xs)
    return [
        context.space.relayout(
            x, tuple(have if have == _ONE else want for have, want in zip(x.dims, dims))
        )
        for x in xs
    ]

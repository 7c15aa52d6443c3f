"""What a lowering makes of sizes inside an op: whether a padded program is right for one more.

A median of 5 or 6 elements takes the third, of 11 the sixth: two recordings may agree in an integer
that is no constant. So each size is compared before it is served for the first time: its ops are
traced, each form of an op once, and every integer in them must be what the recordings say. An op
that stands for a graph of others hands them over one by one (`divided`), as layers repeat.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from tpu_core.compiler.segment import Segment
from tpu_core.lowering.evaluate import call_lowering
from tpu_core.lowering.precision import precision_name
from tpu_core.lowering.registry import Lowering
from tpu_core.pjrt import client as pjrt
from tpu_core.recorder.plan import NodePlan

# Form of the equations, and the numbers in them.
Outline = tuple[str, tuple[float, ...]]
Aval = tuple[tuple[int, ...], np.dtype[Any]]
Call = Callable[[Lowering, tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]


def outlines(segment: Segment) -> Iterator[Outline]:
    """The outline of each node whose ops have one, and of the ops that some of them stand for."""
    ends = [n.numbers for n in segment.nodes[1:]] + [len(segment.numbers)]
    for node, end in zip(segment.nodes, ends):
        if node.plan is None:
            continue
        operands = tuple((segment.slots[i].shape, segment.slots[i].dtype) for i in node.operands)
        lifted = segment.numbers[node.numbers : end]
        yield from _outlines(
            node.plan, operands, tuple((n.pack, n.value if n.compiled_in else None) for n in lifted)
        )


@functools.lru_cache(maxsize=8192)
def _outlines(
    plan: NodePlan, operands: tuple[Aval, ...], lifted: tuple[tuple[int, float | None], ...]
) -> tuple[Outline, ...]:
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    kinds = [pjrt.PACK_DTYPES[k] for k, value in lifted if value is None]

    def lower(values: list[jax.Array], rest: list[jax.Array]) -> list[jax.Array]:
        inputs = iter(rest)
        known = (pjrt.weak(next(inputs)) if v is None else v for _, v in lifted)
        return plan.lower(values, known)

    with jax.enable_x64(True), _dividing() as parts:
        traced = jax.make_jaxpr(lower)(avals, [jax.ShapeDtypeStruct((), k) for k in kinds])
    return (_written(traced), *parts)


def _written(traced: ClosedJaxpr) -> Outline:
    writer = _Writer()
    writer.closed(traced)
    return hashlib.sha256("|".join(writer.form).encode()).hexdigest(), tuple(writer.found)


_parts: ContextVar[list[Outline] | None] = ContextVar("tpu_outlines", default=None)


@contextmanager
def _dividing() -> Iterator[list[Outline]]:
    parts: list[Outline] = []
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)


def divided() -> Call | None:
    """What the lowering of a graph calls other lowerings with while it is outlined, else None.

    Arrays stand in its arguments and results as `jax.ShapeDtypeStruct`.
    """
    parts = _parts.get()
    if parts is None:
        return None

    def call(
        entry: Lowering, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        held, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        # Equal numbers of different types are different arguments.
        types = tuple(type(x).__name__ for x in held)
        parts.append(
            _call_outline(
                entry, tuple(held), types, tree, _Returns(repr(out), out), precision_name()
            )
        )
        return out

    return call


@functools.lru_cache(maxsize=65536)
def _call_outline(
    entry: Lowering, held: tuple[Any, ...], types: tuple[str, ...], tree: Any, out: _Returns, _: str
) -> Outline:
    avals = [x for x in held if isinstance(x, jax.ShapeDtypeStruct)]

    def lower(key: jax.Array, *arrays: jax.Array) -> Any:
        given = iter(arrays)
        leaves = [next(given) if isinstance(x, jax.ShapeDtypeStruct) else x for x in held]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return call_lowering(entry, args, kwargs, out.returns, key)

    # The caller has set the precision and the width of integers.
    return _written(jax.make_jaxpr(lower)(jax.ShapeDtypeStruct((2,), np.uint32), *avals))


@dataclass(frozen=True, slots=True)
class _Returns:
    """What a call returns, compared as text: it may hold lists."""

    text: str
    returns: tuple[Any, ...] = field(compare=False)


class _Writer:
    """Takes a trace apart into its form and its numbers."""

    def __init__(self) -> None:
        self.form: list[str] = []
        self.found: list[float] = []

    def closed(self, traced: ClosedJaxpr) -> None:
        for value in traced.consts:
            array = np.asarray(value)
            self.form.append(
                f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
            )
        self.jaxpr(traced.jaxpr)

    def jaxpr(self, jaxpr: Jaxpr) -> None:
        names: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            names[variable] = len(names)
        for eqn in jaxpr.eqns:
            self.form.append(eqn.primitive.name)
            for atom in eqn.invars:
                self.atom(atom, names)
            for name, value in sorted(eqn.params.items()):
                self.form.append(name)
                self.value(_UNREAD.get((eqn.primitive.name, name), _whole)(value))
            for variable in eqn.outvars:
                names[variable] = len(names)
                aval: Any = variable.aval
                self.form.append(str(aval.dtype))
                self.value(aval.shape)
        for atom in jaxpr.outvars:
            self.atom(atom, names)

    def atom(self, atom: Any, names: dict[Any, int]) -> None:
        if not isinstance(atom, Literal):
            self.form.append(str(names[atom]))
        elif np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype.kind in "iuf":
            self.form.append("number")
            self.found.append(np.asarray(atom.val).item())
        else:
            self.form.append(repr(atom.val))

    def value(self, value: Any) -> None:
        if isinstance(value, ClosedJaxpr):
            self.closed(value)
        elif isinstance(value, Jaxpr):
            self.jaxpr(value)
        elif isinstance(value, (bool, str)) or value is None:
            self.form.append(str(value))
        elif isinstance(value, (int, float, np.number)):
            self.form.append("number")
            self.found.append(np.asarray(value).item())
        elif isinstance(value, (tuple, list)):
            self.form.append(f"{type(value).__name__}{len(value)}")
            for v in value:
                self.value(v)
        elif not callable(value):
            self.form.append(type(value).__name__ if _has_address(value) else repr(value))


def _has_address(value: Any) -> bool:
    return type(value).__repr__ is object.__repr__


def _whole(value: Any) -> Any:
    return value


def _starts(padding: Any) -> Any:
    return [low for low, *_ in padding]


# What rules work out from the sizes of the result instead.
_UNREAD: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("conv_general_dilated", "padding"): _starts,
    ("pad", "padding_config"): lambda config: [(low, inner) for low, _, inner in config],
    ("slice", "limit_indices"): lambda _: None,
    **{(f"reduce_window{kind}", "padding"): _starts for kind in ("", "_sum", "_max", "_min")},
}

"""What a lowering makes of sizes inside an op: whether a padded program is right for one more.

A median of 5 or 6 elements takes the third, of 11 the sixth: two recordings may agree in an integer
that is no constant. So each size is compared before it is served for the first time: its ops are
traced, each form of an op once, and every integer in them must be what the recordings say. An op
that stands for a graph of others sees to that itself (`outlining`), as layers repeat. What was
found is kept on disk with the programs, so that another process traces nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from tpu_core import collector
from tpu_core.cache.store import ExecutableStore
from tpu_core.cache.tiers import TieredStore
from tpu_core.compiler.segment import Segment
from tpu_core.metrics import METRICS
from tpu_core.pjrt import client as pjrt
from tpu_core.recorder.plan import NodePlan

# Form of the equations, and the numbers in them.
Outline = tuple[str, tuple[float, ...]]
Aval = tuple[tuple[int, ...], np.dtype[Any]]

_outlining: ContextVar[bool] = ContextVar("tpu_outlining", default=False)


def outlining() -> bool:
    """Whether an op is traced for its outline: what it traces twice says nothing new."""
    return _outlining.get()


class Outlines:
    """Outlines of segments, traced where the store has none.

    Args:
        store: The cache beyond this process, or None.
        key: Gives the key of a segment in it, from a name of what is kept and its numbers; it
            covers everything that decides what the segment's ops are lowered to.

    Example:
        >>> Outlines(None, key)(segment)
        [('5e1f...', (4.0, 65, 5)), ...]
    """

    def __init__(
        self,
        store: ExecutableStore | TieredStore | None,
        key: Callable[[Segment, str, list[float | int | None]], str],
    ) -> None:
        self._store = store
        self._key = key

    def __call__(self, segment: Segment) -> list[Outline]:
        """The outline of each node whose ops have one."""
        if self._store is None:
            return _trace(segment)
        key = self._key(segment, f"outlines {segment.key}", segment.constants())
        entry = self._store.get(key)
        found = None if entry is None else _decode(entry.payload)
        if found is None:
            found = _trace(segment)
            names = f"the sizes inside {len(found)} ops"
            with contextlib.suppress(TypeError):  # a complex number is no JSON
                self._store.put(key, _encode(found), {"ops": len(found), "names": names})
        return found


def _encode(outlines: list[Outline]) -> bytes:
    """JSON of the different outlines, and which of them each node has."""
    places: dict[str, int] = {}
    nodes = [places.setdefault(json.dumps(outline), len(places)) for outline in outlines]
    return f'{{"outlines": [{", ".join(places)}], "nodes": {nodes}}}'.encode()


def _decode(payload: bytes) -> list[Outline] | None:
    try:
        read = json.loads(payload)
        different = [(str(form), tuple(numbers)) for form, numbers in read["outlines"]]
        return [different[i] for i in read["nodes"]]
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _trace(segment: Segment) -> list[Outline]:
    found = []
    ends = [n.numbers for n in segment.nodes[1:]] + [len(segment.numbers)]
    with collector.paused():
        for node, end in zip(segment.nodes, ends):
            if node.plan is None:
                continue
            operands = tuple(
                (segment.slots[i].shape, segment.slots[i].dtype) for i in node.operands
            )
            lifted = tuple(
                (n.pack, n.value if n.compiled_in else None)
                for n in segment.numbers[node.numbers : end]
            )
            found.append(_outline(node.plan, operands, lifted))
    return found


@functools.lru_cache(maxsize=8192)
def _outline(
    plan: NodePlan, operands: tuple[Aval, ...], lifted: tuple[tuple[int, float | None], ...]
) -> Outline:
    METRICS.outline()
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    kinds = [pjrt.PACK_DTYPES[k] for k, value in lifted if value is None]

    def lower(values: list[jax.Array], rest: list[jax.Array]) -> list[jax.Array]:
        inputs = iter(rest)
        known = (pjrt.weak(next(inputs)) if v is None else v for _, v in lifted)
        return plan.lower(values, known)

    token = _outlining.set(True)
    try:
        with jax.enable_x64(True):
            traced = jax.make_jaxpr(lower)(avals, [jax.ShapeDtypeStruct((), k) for k in kinds])
    finally:
        _outlining.reset(token)
    writer = _Writer()
    writer.closed(traced)
    return hashlib.sha256("|".join(writer.form).encode()).hexdigest(), tuple(writer.found)


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

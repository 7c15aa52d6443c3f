"""Signatures of segments' jaxprs: a padded program's validity for one more size.

A median of 5 or 6 elements takes the third, of 11 the sixth: two recordings may agree in an integer
that is no constant. So each size is compared before it is served for the first time: its ops are
traced, each form of an op once, and every integer in them must be what the recordings say. An op
that stands for a graph of others sees to that itself (`is_tracing`), as layers repeat. What was
found is kept on disk with the programs, so that another process traces nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from tpu_core import gc_control
from tpu_core.cache.store import ExecutableStore
from tpu_core.cache.tiers import TieredStore
from tpu_core.compiler.segment import Node, Segment
from tpu_core.lowering.implementations import for_padded_arrays
from tpu_core.lowering.tables import Table, collected, replaced
from tpu_core.metrics import METRICS
from tpu_core.padding.jaxpr_signature import Signature, has_tables, signature
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import jax_settings
from tpu_core.recorder.plan import NodePlan

Aval = tuple[tuple[Any, ...], np.dtype[Any]]
# Of each number its pack, and where it is compiled in its text and value.
Lifted = tuple[tuple[int, str | None, float | None], ...]
# Gives the signature of a node that need not be traced, by its position in the segment.
Known = Callable[[int, Node], Signature | None]

_tracing: ContextVar[bool] = ContextVar("tpu_tracing_signature", default=False)


def is_tracing() -> bool:
    """Return whether an op is traced for its signature: what it traces twice says nothing new.

    Example:
        >>> layers = distinct_layers if is_tracing() else all_layers
    """
    return _tracing.get()


class SegmentSignatures:
    """Signatures of a segment's ops, traced where the store has none.

    Args:
        store: The cache beyond this process, or None.
        key: Gives the key of a segment in it, from a name of what is kept and its numbers; it
            covers everything that decides what the segment's ops are lowered to.

    Example:
        >>> SegmentSignatures(None, key)(segment)
        [('5e1f...', (4.0, 65, 5)), ...]
    """

    def __init__(
        self,
        store: ExecutableStore | TieredStore | None,
        key: Callable[[Segment, str, list[float | int | None]], str],
    ) -> None:
        self._store = store
        self._key = key

    def __call__(self, segment: Segment, known: Known | None = None) -> list[Signature]:
        """The signature of each node whose ops have one.

        Args:
            segment: The segment.
            known: Signatures that no trace is needed for.
        """
        if self._store is None:
            return _trace(segment, known)
        key = self._key(segment, f"signatures {segment.key}", segment.constants())
        entry = self._store.get(key)
        found = None if entry is None else _decode(entry.payload)
        if found is None:
            found = _trace(segment, known)
            names = f"the sizes inside {len(found)} ops"
            with contextlib.suppress(TypeError):  # a complex number is no JSON
                self._store.put(key, _encode(found), {"ops": len(found), "names": names})
        return found

    def tables(
        self,
        segment: Segment,
        signatures: Sequence[Signature],
        known: Callable[[int, Node], list[Table] | None] | None = None,
    ) -> list[Table]:
        """The tables of a segment's ops, in the order of the ops.

        Args:
            segment: The segment.
            signatures: Its signatures.
            known: Tables of a node that need not be traced.
        """
        found: list[Table] = []
        nodes = [(i, node) for i, node in enumerate(segment.nodes) if node.plan is not None]
        for (i, node), one in zip(nodes, signatures, strict=True):
            if has_tables(one):
                own = known(i, node) if known is not None else None
                found += _traced(segment, i)[1] if own is None else own
        return found


def _encode(signatures: list[Signature]) -> bytes:
    """JSON of the different signatures, and which of them each node has."""
    places: dict[str, int] = {}
    different = {id(one): one for one in signatures}  # nodes that share a trace have one
    found = {k: places.setdefault(json.dumps(one), len(places)) for k, one in different.items()}
    nodes = [found[id(one)] for one in signatures]
    return f'{{"signatures": [{", ".join(places)}], "nodes": {nodes}}}'.encode()


def _decode(payload: bytes) -> list[Signature] | None:
    try:
        read = json.loads(payload)
        different = [(str(form), tuple(kinds), tuple(ns)) for form, kinds, ns in read["signatures"]]
        return [different[i] for i in read["nodes"]]
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _trace(segment: Segment, known: Known | None) -> list[Signature]:
    found = []
    with gc_control.paused():
        for i, node in enumerate(segment.nodes):
            if node.plan is None:
                continue
            one = known(i, node) if known is not None else None
            found.append(_traced(segment, i)[0] if one is None else one)
    return found


def lifted_numbers(segment: Segment, index: int) -> Lifted:
    """The numbers of a node, without the values of those that are run-time inputs."""
    # As text: 0.0 and -0.0 are equal.
    return tuple(
        (n.pack, repr(n.value), n.value) if n.compiled_in else (n.pack, None, None)
        for n in segment.numbers_of(index)
    )


def _traced(segment: Segment, index: int) -> tuple[Signature, list[Table]]:
    node = segment.nodes[index]
    assert node.plan is not None
    operands = tuple((segment.slots[k].shape, segment.slots[k].dtype) for k in node.operands)
    return _signature_of(node.plan, operands, lifted_numbers(segment, index))


@functools.lru_cache(maxsize=8192)
def _signature_of(
    plan: NodePlan, operands: tuple[Aval, ...], lifted: Lifted
) -> tuple[Signature, list[Table]]:
    return trace(plan, operands, lifted)


def trace(
    plan: NodePlan, operands: Sequence[Aval], lifted: Lifted
) -> tuple[Signature, list[Table]]:
    """The signature of an op, and its tables.

    Args:
        plan: Lowers it.
        operands: Shapes, of integers or symbolic dims, and dtypes of its operands.
        lifted: Its numbers.
    """
    METRICS.outline()
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    kinds = [pjrt.PACK_DTYPES[k] for k, text, _ in lifted if text is None]

    def lower(values: list[jax.Array], rest: list[jax.Array], _: Any) -> list[jax.Array]:
        inputs = iter(rest)
        known = (pjrt.weak(next(inputs)) if text is None else v for _, text, v in lifted)
        return plan.lower(values, known)

    def with_tables(
        values: list[jax.Array], rest: list[jax.Array], given: list[jax.Array]
    ) -> list[jax.Array]:
        with replaced(iter(given)):
            return lower(values, rest, given)

    numbers = [jax.ShapeDtypeStruct((), k) for k in kinds]
    token = _tracing.set(True)
    try:
        with jax_settings.lowering(), for_padded_arrays(), collected() as tables:
            traced = jax.make_jaxpr(lower)(avals, numbers, [])
        if tables:
            with jax_settings.lowering(), for_padded_arrays():
                traced = jax.make_jaxpr(with_tables)(avals, numbers, tables)
    finally:
        _tracing.reset(token)
    return signature(traced, tables), tables

"""Families of programs on padded arrays, kept beside their programs for other processes.

The sizes of a program are related by comparing recordings, and the programs' keys follow from that.
A process whose first batch has other sizes than those before would compile it as it is, though a
program on padded arrays that serves it is there. So the integers of the recordings are kept.
Another process puts them into a recording of its own and traces that. It uses the programs where
the signature that follows is the one that they were made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from tpu_core.compiler.context import BuildContext
from tpu_core.compiler.segment import Node, RuntimeScalar, Segment
from tpu_core.padding.bucketed_program import BucketedProgram, Recording
from tpu_core.padding.recording import (
    describe,
    places_of_nodes,
    reused,
    shapes_of_slots,
    with_integers,
)
from tpu_core.recorder.compute import LoweringCompute
from tpu_core.recorder.plan import NodePlan

logger = logging.getLogger("tpu_core")

Shapes = list[list[int]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A family as it is kept.

    Attributes:
        signature: Of its programs.
        starts_vary: As of `BucketedProgram`.
        buckets: Of its programs.
        recordings: Of each its integers, its numbers and the shapes of its nodes' results.
    """

    signature: str
    starts_vary: bool
    buckets: set[tuple[int, ...]]
    recordings: list[tuple[list[int], list[RuntimeScalar], list[Shapes]]]

    def encode(self) -> bytes:
        """JSON of it.

        Raises:
            TypeError: One of the numbers is complex.
        """
        recordings = [
            [integers, [[n.pack, n.compiled_in, n.value] for n in numbers], results]
            for integers, numbers, results in self.recordings
        ]
        found = [self.signature, self.starts_vary, sorted(self.buckets), recordings]
        return json.dumps(found).encode()

    @classmethod
    def decode(cls, payload: bytes) -> _Stored:
        """From what `encode` gave."""
        signature, starts_vary, buckets, recordings = json.loads(payload)
        return cls(
            signature,
            starts_vary,
            set(map(tuple, buckets)),
            [(i, [RuntimeScalar(*n) for n in numbers], r) for i, numbers, r in recordings],
        )


class StoredFamilies:
    """The recordings of families, by their form, and the buckets of the programs that they have.

    Args:
        context: The client's.
        source: Digest of what chooses the buckets.

    Example:
        >>> families = StoredFamilies(context, source)
        >>> families.save(bucketed)
        >>> families.load(segment, empty)  # in another process
    """

    def __init__(self, context: BuildContext, source: str) -> None:
        self._context = context
        self._source = source

    def _key(self, s: Segment, form: str) -> str:
        return self._context.key(s, f"family {form} {self._source}", [])

    def save(self, bucketed: BucketedProgram) -> None:
        """Keep the recordings of a family, and which programs there are.

        Args:
            bucketed: Has programs. One that other processes cannot make again is not kept: that of
                a compiled graph, of a JAX function, of an op that PyTorch decomposes.
        """
        context, buckets = self._context, set(bucketed.programs)
        segments = [r.segment for r in bucketed.recordings]
        kept = bucketed.signature(), buckets
        if context.store is None or bucketed.kept == kept or not _can_be_resized(segments[0]):
            return
        bucketed.kept = kept
        s = segments[0]
        key = self._key(s, bucketed.form)
        before = self._read(key)
        if before is not None and before.signature == bucketed.signature():
            if buckets <= before.buckets:
                return
            buckets = buckets | before.buckets
        recordings = [
            (r.integers, r.segment.numbers, [_results(n) for n in r.segment.nodes])
            for r in bucketed.recordings
        ]
        stored = _Stored(bucketed.signature(), bucketed.starts_vary, buckets, recordings)
        manifest = {"ops": len(s.nodes), "names": f"the sizes of {s.op_names()}"}
        with contextlib.suppress(TypeError):  # a complex number is no JSON
            context.store_data(key, stored.encode(), manifest)

    def load(self, s: Segment, empty: BucketedProgram) -> bool:
        """Give a family the recordings that were kept of its form.

        Args:
            s: A segment of that form.
            empty: A family without recordings.

        Returns:
            Whether there were any that the segment is one more recording of.
        """
        found = self._read(self._key(s, empty.form))
        if found is None or not _can_be_resized(s):
            return False
        recordings = []
        for integers, numbers, results in found.recordings:
            segment = _resized(s, integers, numbers, results)
            if describe(segment).integers != integers:
                return False
            recordings.append(Recording(segment, integers, None))
        empty.restore(recordings, found.starts_vary, found.signature, found.buckets)
        if empty.solve(s, describe(s).integers, learns=False) is None:
            return False
        return bool(empty.stored())

    def _read(self, key: str) -> _Stored | None:
        entry = self._context.store.get(key) if self._context.store else None
        if entry is None:
            return None
        try:
            return _Stored.decode(entry.payload)
        except (ValueError, TypeError):
            logger.info("A stored family is none: %s", key)
            return None


def _can_be_resized(s: Segment) -> bool:
    """Return whether the segment follows from its integers, in another process too."""
    plans = (n.plan for n in s.nodes if n.plan is not None)
    return all(
        isinstance(p.compute, LoweringCompute) and not p.compute.is_local and not p.jax_settings
        for p in plans
    )


def _results(node: Node) -> Shapes:
    """Shapes of what a node's lowering gives."""
    if node.plan is None:
        return []
    return [list(out.shape) for out in jax.tree.leaves(node.plan.compute.out)]


def _resized(
    s: Segment, integers: Sequence[int], numbers: list[RuntimeScalar], results: list[Shapes]
) -> Segment:
    """The segment with the integers of `describe` and the numbers of another recording."""
    plans: dict[Any, NodePlan] = {}  # layers that repeat share plans
    nodes = []
    for node, places, shapes in zip(s.nodes, places_of_nodes(s), results, strict=True):
        if node.plan is None:
            nodes.append(node)
            continue
        own = [tuple(integers[i] for i in kind) for kind in places]
        made = tuple(map(tuple, shapes))
        key = (id(node.plan), *own, made)
        if key not in plans:
            sizes, strides, arguments = map(iter, own)
            plans[key] = with_integers(node.plan, sizes, strides, arguments, iter(made))
        nodes.append(replace(node, plan=plans[key]))
    shapes_of = shapes_of_slots(s, integers)
    slots = [replace(slot, shape=shape) for slot, shape in zip(s.slots, shapes_of)]
    text = f"{s.key} {integers} {results}"
    return replace(
        s,
        key=hashlib.sha256(text.encode()).hexdigest(),
        nodes=nodes,
        slots=slots,
        numbers=numbers,
        donated=reused(s),
    )

"""Padded programs: recordings that differ in sizes, and one executable for each bucket of sizes.

Which sizes share a program, and when one gets its own, is the policy of a mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_core.compiler.context import BuildContext
from tpu_core.compiler.programs import Program
from tpu_core.compiler.segment import Node, Segment
from tpu_core.metrics import METRICS
from tpu_core.padding.bucketed_program import BucketedProgram, Recording
from tpu_core.padding.check import differences
from tpu_core.padding.form_difference import form_difference
from tpu_core.padding.recording import Description, describe, form_of_node, sizes_of_node
from tpu_core.padding.segment_signature import SegmentSignatures
from tpu_core.padding.sizes import NotPaddableError
from tpu_core.padding.stored_families import StoredFamilies
from tpu_core.padding.synthetic import has_graphs, has_lost_graphs, ops_of, synthesize
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.padded_array import PaddedArray, array_of, fitted

_Run = Callable[[list[Any], Sequence[int], Sequence[tuple[int, ...]]], list[Any]]


class PaddedPrograms:
    """Makes programs for segments that differ in sizes alone.

    Args:
        context: The client's.
        source: Digest of what chooses the buckets, for their keys.

    Example:
        >>> padded = PaddedPrograms(context, package_digest("mylib"))
        >>> bucketed = padded.new(segment)
        >>> padded.add(bucketed, segment, program)  # and one of another size
        >>> values = bucketed.solve(other, padded.integers(other))
        >>> buckets = bucketed.buckets(values)
        >>> bucketed.programs[buckets] = padded.obtain(bucketed, other, values, buckets, arrays)
        >>> padded.program(bucketed, other, values, buckets, lambda arguments: False)
    """

    def __init__(self, context: BuildContext, source: str) -> None:
        self._context = context
        self._source = source
        self._signatures = SegmentSignatures(context.store, context.key)
        self._stored = StoredFamilies(context, source)
        self._described: tuple[Segment, Description] | None = None

    @staticmethod
    def form_of(node: Node) -> str:
        """The arguments of a node without the integers that may vary."""
        return form_of_node(node)

    @staticmethod
    def sizes_of(node: Node) -> tuple[tuple[int, ...], ...]:
        """The integers of a node that may vary."""
        return sizes_of_node(node)

    @staticmethod
    def digest_of(s: Segment) -> str:
        """As `form`, of a segment that is looked at once."""
        return describe(s).form

    @staticmethod
    def has_graphs(s: Segment) -> bool:
        """Return whether an op of the segment is a graph, which may declare its sizes."""
        return has_graphs(s)

    @staticmethod
    def has_lost_graphs(s: Segment) -> bool:
        """Return whether a graph that an op stands for was let go of, by a reset say."""
        return has_lost_graphs(s)

    @staticmethod
    def ops_of(node: Node) -> Sequence[str]:
        """Names of what a node computes: its op, or those of the graph that it stands for."""
        return ops_of(node)

    @staticmethod
    def form_difference(earlier: Segment, later: Segment) -> str | None:
        """Reason that two segments are no recordings of one program with several sizes."""
        return form_difference(earlier, later)

    @staticmethod
    def is_padded(array: Any) -> bool:
        """Return whether an argument of a program has padding."""
        return isinstance(array, PaddedArray)

    def _describe(self, s: Segment) -> Description:
        if self._described is None or self._described[0] is not s:
            self._described = (s, describe(s))
        return self._described[1]

    def form(self, s: Segment) -> str:
        """Digest of a segment without its sizes."""
        return self._describe(s).form

    def outline(self, s: Segment) -> str:
        """As `form`, but for which sizes are 1: a program for larger ones may serve those."""
        return self._describe(s).outline

    def integers(self, s: Segment) -> list[int]:
        """The integers of a segment that may vary."""
        return self._describe(s).integers

    def new(self, s: Segment) -> BucketedProgram:
        """A program without recordings, for segments of this one's form."""
        described = self._describe(s)
        return BucketedProgram(self._signatures, described.form, described.tensors)

    def of_recordings(self, segments: Sequence[Segment]) -> BucketedProgram:
        """A program for the sizes of some segments of one form, all of whose starts may vary."""
        made = self.new(segments[0])
        recordings = [Recording(s, self.integers(s), None) for s in segments]
        made.restore(recordings, True, "", set())
        return made

    def stored(self, s: Segment) -> BucketedProgram | None:
        """A program whose recordings another process kept, and that serves the segment."""
        made = self.new(s)
        return made if self._stored.load(s, made) else None

    def save(self, bucketed: BucketedProgram) -> None:
        """Keep the recordings of a program, and which buckets it has, for other processes."""
        self._stored.save(bucketed)

    def synthetic(self, s: Segment) -> BucketedProgram | None:
        """A program of recordings at other sizes, where graphs in the segment declare sizes."""
        synthetic = synthesize(s)
        if synthetic is None:
            return None
        recordings = [Recording(x, describe(x).integers, None) for x in synthetic.segments]
        return BucketedProgram.from_synthetic(synthetic, recordings, self.new(s))

    def add(self, bucketed: BucketedProgram, s: Segment, program: Program) -> None:
        """Add a segment that runs as it was recorded."""
        bucketed.add(Recording(s, self.integers(s), program))

    def observe(self, bucketed: BucketedProgram, s: Segment) -> None:
        """Add the sizes of a segment that runs without a program, while there is no padded one."""
        bucketed.observe(Recording(s, self.integers(s), None))

    def key(self, bucketed: BucketedProgram, s: Segment, buckets: tuple[int, ...]) -> str:
        """Cache key of the program for some buckets."""
        text = f"{bucketed.form} {bucketed.signature()} {buckets} {self._source}"
        return self._context.key(s, text, bucketed.segment().constants())

    def obtain(
        self,
        bucketed: BucketedProgram,
        s: Segment,
        values: list[int],
        buckets: tuple[int, ...],
        arrays: list[Any],
    ) -> tuple[pjrt.Loaded, str]:
        """An executable for some buckets, and its key.

        Args:
            bucketed: The program.
            s: The segment that is about to run.
            values: Its sizes, as ``bucketed.solve`` gives them.
            buckets: Padded size of each of them.
            arrays: Inputs of the segment, on which a new executable is checked.

        Raises:
            NotPaddableError: An op cannot run on padded arrays, or does not do so as it should.
        """
        outputs = [(bucketed.bound(i, buckets), s.slots[i].dtype) for i in s.live]
        key = self.key(bucketed, s, buckets)
        context = self._context

        def check(loaded: pjrt.Loaded) -> None:
            run = self._runner(bucketed, s, values, buckets, loaded)
            device = context.client.devices[s.device]
            problem = differences(bucketed, buckets, run, arrays, device)
            if problem:
                raise NotPaddableError(problem)

        sizes = ", ".join(f"{v} in {b}" for v, b in zip(values, buckets))
        why = context.explain(s)
        reason = replace(why, text=f"{why.text}; on padded arrays from now on ({sizes})")
        lower = functools.partial(bucketed.lower, buckets)
        loaded = context.obtain(s, key, lower, outputs, reason, check)
        context.remember(s)
        return loaded, key

    def program(
        self,
        bucketed: BucketedProgram,
        s: Segment,
        values: list[int],
        buckets: tuple[int, ...],
        gives_way: Callable[[list[Any]], bool],
    ) -> Program:
        """The program of a segment, by an executable of ``bucketed.programs``.

        Args:
            bucketed, s, values, buckets: As of `obtain`.
            gives_way: Called with the arguments of each run: whether another program is to be asked
                for in its place.
        """
        executable, key = bucketed.programs[buckets]
        run = self._runner(bucketed, s, values, buckets, executable)
        inputs = [bucketed.bound(i, buckets) for i in s.inputs()]
        shapes = [s.slots[i].shape for i in s.live]

        def execute(arguments: list[Any]) -> list[Any] | None:
            if gives_way(arguments):
                return None
            copies = sum(array_of(a).shape != bound for a, bound in zip(arguments, inputs))
            METRICS.padded_execution(copies)
            return run(arguments, values, shapes)

        program = self._context.program(s, executable, key)
        mask = [n.compiled_in for n in bucketed.segment().numbers]
        return replace(program, execute=execute, handlers=None, compiled_in=mask)

    def _runner(
        self,
        bucketed: BucketedProgram,
        s: Segment,
        made_for: Sequence[int],
        buckets: tuple[int, ...],
        loaded: pjrt.Loaded,
    ) -> _Run:
        device = self._context.client.devices[s.device]
        inputs = [bucketed.bound(i, buckets) for i in s.inputs()]
        outputs = [bucketed.bound(i, buckets) for i in s.live]

        def tables(values: Sequence[int]) -> list[Any]:
            return [pjrt.put(t, device) for t in bucketed.tables(values, buckets)]

        given = tables(made_for)

        def run(
            arguments: list[Any], values: Sequence[int], shapes: Sequence[tuple[int, ...]]
        ) -> list[Any]:
            padded = [fitted(a, shape, device) for a, shape in zip(arguments, inputs)]
            sizes = pjrt.put_numbers(2, np.asarray(values, np.int32).tobytes(), device)
            own = given if list(values) == list(made_for) else tables(values)
            sharded = loaded.execute([*padded, *arguments[len(inputs) :], *own, sizes])
            results = sharded.consume_with_handlers(loaded.handlers)
            return [
                r if shape == bound else PaddedArray(r, shape)
                for r, shape, bound in zip(results, shapes, outputs)
            ]

        return run

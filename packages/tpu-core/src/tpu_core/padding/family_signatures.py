"""Signatures and tables of the ops of a family, as functions of its sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpu_core.compiler.segment import Node, Segment
from tpu_core.lowering.tables import Table
from tpu_core.padding.fit import Fit
from tpu_core.padding.jaxpr_signature import Signature, has_tables
from tpu_core.padding.segment_signature import SegmentSignatures
from tpu_core.padding.sizes import Known, NotPaddableError, Size
from tpu_core.padding.symbolic_signature import SymbolicSignatures

# Sizes whose tables are kept.
_MOST_TABLES = 64
# Pairs of signatures that are known to agree.
_MOST_AGREED = 4096

# Form of a signature, and its numbers as functions of the symbols.
Expected = tuple[str, list[Known | None]]


class FamilySignatures:
    """Signatures and tables of the ops of a family.

    Args:
        signatures: Signatures of a segment's ops.
        segments: The recordings, with the numbers that vary as run-time inputs.
        fit: The relations of their sizes.

    Attributes:
        expected: For each op the form of its signature, "" where the recordings differ in it, and
            its numbers as functions of the symbols. None stands for one that differs but follows no
            size: a rule has no use for it, or refuses.
        tables: Of each recording the tables of its ops, in order.
    """

    def __init__(
        self, signatures: SegmentSignatures, segments: Sequence[Segment], fit: Fit
    ) -> None:
        self._signatures = signatures
        self._fit = fit
        found = [signatures(s) for s in segments]
        self._symbolic = SymbolicSignatures(segments, found, fit)
        self.expected: list[Expected] = []
        alike: dict[str, Expected] = {}  # layers repeat
        for nodes in zip(*found):
            forms = {form for form, _, _ in nodes}
            if len(forms) > 1:
                self.expected.append(("", []))
                continue
            dtypes = nodes[0][1]
            numbers = [
                fit.follow(seen, np.int64 if dtype == "int" else np.dtype(dtype))
                for seen, dtype in zip(zip(*(inside for _, _, inside in nodes)), dtypes)
            ]
            one = (forms.pop(), numbers)
            self.expected.append(alike.setdefault(repr(one), one))
        self.tables = [signatures.tables(s, own) for s, own in zip(segments, found)]
        self._of_recordings = {tuple(v): t for v, t in zip(fit.values, self.tables)}
        self._of_members: dict[tuple[int, ...], list[Table]] = {}
        self._agreed: dict[tuple[int, int], tuple[Signature, Expected]] = {}  # by their ids

    def agree(self, segment: Segment, values: Sequence[int], traced: bool = False) -> bool:
        """Return whether the ops of a segment have the sizes inside that the recordings say.

        Args:
            segment: The segment.
            values: Its sizes.
            traced: Whether each op is traced at its sizes: a trace of symbolic sizes is of larger
                ones than 1.
        """

        def known(i: int, node: Node) -> Signature | None:
            return None if traced else self._symbolic.at(i, node, values)

        found = self._signatures(segment, known)
        # Nodes that share a trace have one signature, and without sizes inside one for all sizes.
        pairs = {(id(one), id(e)): (one, e) for one, e in zip(found, self.expected)}
        agrees = len(found) == len(self.expected) and all(
            form == f and all(e is None or e.holds(n, values) for n, e in zip(inside, ns))
            for key, ((form, _, inside), (f, ns)) in pairs.items()
            if key not in self._agreed
        )
        if agrees and len(self._agreed) < _MOST_AGREED:
            static = {k: p for k, p in pairs.items() if all(e and not e.factors for e in p[1][1])}
            self._agreed |= static
        if agrees and any(map(has_tables, found)):
            self._of_members[tuple(values)] = self._signatures.tables(
                segment,
                found,
                lambda i, node: None if traced else self._symbolic.tables(i, node, values),
            )
            if len(self._of_members) > _MOST_TABLES:
                del self._of_members[next(iter(self._of_members))]
        return agrees

    def are_of(self, segment: Segment) -> bool:
        """Return whether a segment's ops are the recordings' but for numbers in them."""
        found = self._signatures(segment)
        return len(found) == len(self.expected) and all(
            form == f for (form, *_), (f, _) in zip(found, self.expected)
        )

    def table_sizes(self) -> list[tuple[Size, ...]]:
        """The sizes of each table.

        Raises:
            NotPaddableError: They follow no sizes of tensors.
        """
        found = []
        for tables in zip(*self.tables):
            sizes = [self._fit.derive(seen) for seen in zip(*(t.shape for t in tables))]
            if None in sizes or len({t.ndim for t in tables}) > 1:
                raise NotPaddableError("a table's shape follows no size")
            found.append(tuple(s for s in sizes if s is not None))
        return found

    def padded_tables(self, values: Sequence[int], buckets: Sequence[int]) -> list[Table]:
        """The tables at some sizes, as inputs of the program for some buckets."""
        known = self._of_recordings | self._of_members
        found = []
        for t, sizes in zip(known.get(tuple(values), ()), self.table_sizes(), strict=True):
            padded = np.zeros([s.value(buckets) for s in sizes], t.dtype)
            padded[tuple(slice(0, n) for n in t.shape)] = t
            found.append(padded)
        return found

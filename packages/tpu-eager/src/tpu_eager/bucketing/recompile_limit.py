"""A limit on the programs compiled for one line, and the parts that a segment runs in beyond it.

A step may differ in every round in a way that no program on padded arrays serves: a crop that is
resized, a different number of tensors that are joined. Compiled as a whole each round would be a
program, on a TPU some seconds. After ``TPU_RECOMPILE_LIMIT`` programs for one line such a segment
runs in parts: what differs by PyTorch's CPU kernels, as an op without a lowering would, and what is
before and after it as programs of their own, which are the same each time or differ in sizes alone.
It costs copies to the host and back, and no compile. See ``docs/adr/0028-recompile-limit.md``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from tpu_core.config import config
from tpu_core.extend import BuildContext, Node, Segment
from tpu_eager.bucketing.alignment import differing
from tpu_eager.bucketing.line_programs import COMBINE, PART, LinePrograms, forms_of, sizes_of
from tpu_eager.costs import SMALL, compile_seconds, nbytes

Part = tuple[int, int, bool]
"""First node, the node after the last, and whether CPU kernels run them."""

_PART_SHARE = 2  # A line that ends a part may compile one part in so many of the limit.
_IN_A_ROW = 8  # runs of a segment after which it is no longer one that differs,
_OF_A_FORM = 16  # and of its form, in many sizes
_RECURS = 32  # runs in all after which a segment is compiled, as are sizes (`promotion.RUNS`),
_SHARE = 16  # if it is one of so many of those that its line ran in parts
_ALLOWANCE = 4  # programs of a form that is the same all the time: two of sizes, two padded ones
_MOST_LINES = 128
_FEW = 3  # forms after which a much larger one is not compiled at its first time
_MOST_COUNTED = 1_024  # segments of a line
_LEAST_OPS = 16  # that are a program of their own, if none of them is a product
# Why a segment ends, as cut_points.h has it.
_REPETITION = "repetition"


class RecompileLimit:
    """Counts the programs of each line, and says where a segment is to be divided."""

    def __init__(self) -> None:
        self._lines: OrderedDict[tuple[bool, str, str], LinePrograms] = OrderedDict()

    def made(self, s: Segment) -> None:
        """Count a program that was compiled, or loaded: another process comes to the same parts."""
        self._line(s).add(s)

    def padded(self, s: Segment, form: str) -> None:
        """Take note of a form that runs on padded arrays."""
        self._line(s).padded.add(form)

    def refused(self, s: Segment, op: str) -> None:
        """Take note of an op, by its label, that cannot run on padded arrays."""
        self._line(s).refused.add(op)

    def is_reached(self, s: Segment, form: str) -> bool:
        """Return whether a segment's line has as many programs as it may have."""
        limit = config().recompile_limit
        line = self._lines.get(_key(s))
        # A loop is cut after any op of its body: at one line it may be cut at many.
        if line is None or (s.cut == _REPETITION and line.programs < limit):
            line = self._alike(s, limit) or line
        if not limit or line is None:
            return False
        limit = _limit(s)
        if line.programs < limit:
            return False
        line.read()
        return not line.allowed.get(form) and line.count() >= limit

    def is_much_larger(self, s: Segment, form: str) -> bool:
        """Return whether a segment of a new form takes twice as long to compile as any program of
        its line, as a longer loop.
        """
        line = self._lines.get(_key(s))
        if line is None or not config().recompile_limit or line.programs < min(_limit(s), _FEW):
            return False
        line.read()
        if form in line.forms or line.count() < _FEW:
            return False
        return compile_seconds(s.nodes) >= 2 * line.longest

    def forms_alike(self, s: Segment) -> set[str]:
        """Forms of the programs of all lines that have mostly a segment's ops."""
        forms = Counter(forms_of(s))
        lines = [x for (is_part, _, _), x in self._lines.items() if not is_part]
        return {form for line in lines if line.is_alike(forms) for form in line.forms}

    def _alike(self, s: Segment, limit: int) -> LinePrograms | None:
        """A line that is met for the first time, where another one is at its limit with mostly the
        same ops: their programs count as its own.

        A step ends at another line once a loss is read in it, or a learning rate is changed.
        """
        if not limit or s.cut == PART or len(s.nodes) < _LEAST_OPS:
            return None
        forms: Counter[int] = Counter()
        for (is_part, _, _), other in reversed(self._lines.items()):
            if is_part or other.programs < limit:
                continue
            forms = forms or Counter(forms_of(s))
            if other.is_alike(forms) and other.count() >= limit:
                line = self._line(s)
                line.take_over(other)
                return line
        return None

    def recurs(self, s: Segment, form: str) -> bool:
        """Count a segment that has no program beyond the limit; whether it is worth one.

        One that comes all the time is a new phase of the program, and so is a form of ops that was
        not there before and now comes all the time in many sizes.
        """
        line = self._line(s)
        line.read()
        in_a_row, of_the_form = line.key.add(s.key), line.form.add(form)
        count = line.counts.pop(s.key, 0) + 1
        line.counts[s.key] = count
        line.runs += 1
        while len(line.counts) > _MOST_COUNTED:
            line.counts.popitem(last=False)
        if count >= _RECURS and count * _SHARE >= line.runs:
            return True
        if s.cut == PART:  # one segment may have many that are the same
            return False
        if of_the_form >= _OF_A_FORM and form not in line.forms:
            line.allowed[form] = _ALLOWANCE
            return True
        return in_a_row >= _IN_A_ROW

    def parts(self, s: Segment, by_sizes: bool = False) -> list[Part] | None:
        """The parts to run a segment in, or None where none of them may run by CPU kernels.

        Args:
            s: The segment.
            by_sizes: Whether an op differs that had other sizes, where no form of an op differs:
                padded arrays do not serve them.
        """
        line = self._line(s)
        nodes = s.nodes
        if len(nodes) == 1:
            return [(0, 1, True)] if _may_run_on_host(s, nodes[0]) else None
        differs = self._differing(s, line)
        if by_sizes and not any(differs):
            differs = self._resized(s, line)
        on_host = [d and _may_run_on_host(s, n) for d, n in zip(differs, nodes)]
        if not any(on_host):
            return None
        # A few ops between them are no program of their own.
        for i, j in _runs(on_host, False):
            if (
                j - i < _LEAST_OPS
                and not any(differs[i:j])
                and all(_may_run_on_host(s, n) for n in nodes[i:j])
            ):
                on_host[i:j] = [True] * (j - i)
        # How many words of checks there are differs with the ops: no program combines them.
        combines = [n.name == COMBINE for n in nodes]
        kinds = list(zip(on_host, differs, combines))
        bounds = [i for i in range(len(nodes)) if i == 0 or kinds[i] != kinds[i - 1]]
        return [(i, j, on_host[i]) for i, j in pairwise([*bounds, len(nodes)])]

    def to_warn_of(self, s: Segment, parts: list[Part] | None) -> tuple[Node, int] | None:
        """The op to warn of, and how many programs its line has; None for a line that had it.

        Parts are no segments of the user's.
        """
        line = self._line(s)
        if s.cut == PART or line.warned:
            return None
        line.warned = True
        on_host = [n for i, j, is_host in parts or () if is_host for n in s.nodes[i:j]]
        differing = [n for n, d in zip(s.nodes, self._differing(s, line)) if d]
        with_line = (n for n in [*on_host, *differing] if n.line)
        return next(with_line, s.nodes[-1]), line.programs

    def _line(self, s: Segment) -> LinePrograms:
        key = _key(s)
        line = self._lines.setdefault(key, LinePrograms())
        self._lines.move_to_end(key)
        while len(self._lines) > _MOST_LINES:
            self._lines.popitem(last=False)
        return line

    def _differing(self, s: Segment, line: LinePrograms) -> list[bool]:
        line.read()
        differs = differing(forms_of(s), list(line.ops))
        refused = set(line.refused)
        return [d or n.label in refused for d, n in zip(differs, s.nodes)]

    def _resized(self, s: Segment, line: LinePrograms) -> list[bool]:
        forms, sizes = forms_of(s), sizes_of(s)
        others = [z for f, z in zip(list(line.ops), list(line.sizes)) if f == forms]
        return [any(z[i] != n for z in others) for i, n in enumerate(sizes)]


def _limit(s: Segment) -> int:
    limit = config().recompile_limit
    return max(limit // _PART_SHARE, 1) if s.cut == PART else limit


def _may_run_on_host(s: Segment, node: Node) -> bool:
    is_small = nbytes(s, (*node.operands, *node.outputs)) <= SMALL
    return BuildContext.may_run_on_host(node, products=is_small)


def _key(s: Segment) -> tuple[bool, str, str]:
    # What combines the words of checks has no line.
    last = next((n for n in reversed(s.nodes) if n.line), s.nodes[-1])
    return s.cut == PART, last.line, last.name


def _runs(values: Sequence[bool], kind: bool) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of a value."""
    start = 0
    for value, run in groupby(values):
        length = len(list(run))
        if value is kind:
            yield start, start + length
        start += length

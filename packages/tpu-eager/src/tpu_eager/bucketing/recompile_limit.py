"""A limit on the programs compiled for one line, and the parts that a segment runs in beyond it.

A step may differ in every round in a way that no program on padded arrays serves: a crop that is
resized, a different number of tensors that are joined. Compiled as a whole each round would be a
program, on a TPU some seconds. After ``TPU_RECOMPILE_LIMIT`` programs for one line such a segment
runs in parts: what differs by PyTorch's CPU kernels, as an op without a lowering would, and what is
before and after it as programs of their own, which are the same each time or differ in sizes alone.
It costs copies to the host and back, and no compile. See ``docs/adr/0028-recompile-limit.md``.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from tpu_core.config import config
from tpu_core.extend import BuildContext, Node, PaddedPrograms, Segment
from tpu_eager.bucketing.alignment import differing
from tpu_eager.costs import SMALL, compile_seconds, nbytes

Part = tuple[int, int, bool]
"""First node, the node after the last, and whether CPU kernels run them."""

_PART_SHARE = 2  # A line that ends a part may compile one part in so many of the limit.
_IN_A_ROW = 8  # runs of a segment after which it is no longer one that differs,
_OF_A_FORM = 16  # and of its form, in many sizes
_RECURS = 32  # runs in all after which a segment is compiled, as are sizes (`promotion.RUNS`),
_SHARE = 16  # if it is one of so many of those that its line ran in parts
_ALLOWANCE = 4  # programs of a form that is the same all the time: two of sizes, two padded ones
_MOST_SITES = 128
_MOST_COMPARED = 8  # latest programs of a line
_MOST_UNREAD = 64
_FEW = 3  # forms after which a much larger one is not compiled at its first time
_BUCKETS = 4  # programs of a form that count as one: two of sizes, two padded ones
_MOST_COUNTED = 1_024  # segments of a line
_LEAST_OPS = 16  # that are a program of their own, if none of them is a product
_COMBINE = "tpu.combine_words.default"
# Why a segment ends, as cut_points.h and op_by_op.cpp have it.
_REPETITION = "repetition"
PART = "part of a segment that varies"


@dataclass(slots=True)
class _Streak:
    """Number of times that the same came in a row."""

    what: str = ""
    length: int = 0

    def add(self, what: str) -> int:
        self.length = self.length + 1 if what == self.what else 1
        self.what = what
        return self.length


@dataclass(slots=True)
class _Site:
    """The programs of segments that end at one line.

    Attributes:
        programs: Number of them.
        unread: Those that are not among the following. Describing a training step takes as long
            as recording it, and most lines never come to the limit.
        ops: Of the latest ones, the form of each op: a hash of its arguments without sizes.
        sizes: The same with sizes.
        forms: Number of programs by the digest of their form.
        padded: Forms that padded arrays serve.
        seconds: Estimate of the time to compile the programs.
        refused: Labels of ops that cannot run on padded arrays.
        allowed: Programs that a form may yet have beyond the limit.
        key, form: Of the segments that had no program.
        counts: Runs of each of the latest of them.
        runs: Of all of them.
        warned: Whether the user knows.
    """

    programs: int = 0
    unread: deque[Segment] = field(default_factory=lambda: deque(maxlen=_MOST_UNREAD))
    ops: deque[array[int]] = field(default_factory=lambda: deque(maxlen=_MOST_COMPARED))
    sizes: deque[array[int]] = field(default_factory=lambda: deque(maxlen=_MOST_COMPARED))
    forms: Counter[str] = field(default_factory=Counter)
    padded: set[str] = field(default_factory=set)
    seconds: float = 0.0
    refused: set[str] = field(default_factory=set)
    allowed: dict[str, int] = field(default_factory=dict)
    key: _Streak = field(default_factory=_Streak)
    form: _Streak = field(default_factory=_Streak)
    counts: OrderedDict[str, int] = field(default_factory=OrderedDict)
    runs: int = 0
    warned: bool = False

    def take_over(self, other: _Site) -> None:
        """Count the programs of another line as this one's."""
        self.programs, self.seconds, self.warned = other.programs, other.seconds, True
        self.ops.extend(other.ops)
        self.sizes.extend(other.sizes)
        self.forms.update(other.forms)
        self.padded |= other.padded
        self.refused |= other.refused


class RecompileLimit:
    """Counts the programs of each line, and says where a segment is to be divided."""

    def __init__(self) -> None:
        self._sites: OrderedDict[tuple[bool, str, str], _Site] = OrderedDict()

    def made(self, s: Segment) -> None:
        """Count a program that was compiled, or loaded: another process comes to the same parts."""
        site = self._site(s)
        site.programs += 1
        site.seconds += compile_seconds(s.nodes)  # now: a graph in it may be gone later
        site.unread.append(s)

    def padded(self, s: Segment, form: str) -> None:
        """Take note of a form that runs on padded arrays."""
        self._site(s).padded.add(form)

    def refused(self, s: Segment, op: str) -> None:
        """Take note of an op, by its label, that cannot run on padded arrays."""
        self._site(s).refused.add(op)

    def is_reached(self, s: Segment, form: str) -> bool:
        """Return whether a segment's line has as many programs as it may have."""
        limit = config().recompile_limit
        site = self._sites.get(_key(s))
        # A loop is cut after any op of its body: at one line it may be cut at many.
        if site is None or (s.cut == _REPETITION and site.programs < limit):
            site = self._alike(s, limit) or site
        if not limit or site is None:
            return False
        if s.cut == PART:
            limit = max(limit // _PART_SHARE, 1)
        if site.programs < min(limit, _FEW):
            return False
        _read(site)
        if site.allowed.get(form):
            return False
        if (counted := _count(site)) >= limit or form in site.forms:
            return counted >= limit
        # A loop of another length, which takes half as long to compile as all programs so far.
        return counted >= _FEW and compile_seconds(s.nodes) * 2 >= site.seconds

    def _alike(self, s: Segment, limit: int) -> _Site | None:
        """A line that is met for the first time, where another one is at its limit with mostly the
        same ops: their programs count as its own.

        A step ends at another line once a loss is read in it, or a learning rate is changed.
        """
        if not limit or s.cut == PART or len(s.nodes) < _LEAST_OPS:
            return None
        forms: Counter[int] = Counter()
        for (is_part, _, _), other in reversed(self._sites.items()):
            if is_part or other.programs < limit:
                continue
            _read(other)
            forms = forms or Counter(_forms(s))
            if any(_is_alike(forms, Counter(ops)) for ops in other.ops) and _count(other) >= limit:
                site = self._site(s)
                site.take_over(other)
                return site
        return None

    def recurs(self, s: Segment, form: str) -> bool:
        """Count a segment that has no program beyond the limit; whether it is worth one.

        One that comes all the time is a new phase of the program, and so is a form of ops that was
        not there before and now comes all the time in many sizes.
        """
        site = self._site(s)
        _read(site)
        in_a_row, of_the_form = site.key.add(s.key), site.form.add(form)
        count = site.counts.pop(s.key, 0) + 1
        site.counts[s.key] = count
        site.runs += 1
        while len(site.counts) > _MOST_COUNTED:
            site.counts.popitem(last=False)
        if count >= _RECURS and count * _SHARE >= site.runs:
            return True
        if s.cut == PART:  # one segment may have many that are the same
            return False
        if of_the_form >= _OF_A_FORM and form not in site.forms:
            site.allowed[form] = _ALLOWANCE
            return True
        return in_a_row >= _IN_A_ROW

    def parts(self, s: Segment, by_sizes: bool = False) -> list[Part] | None:
        """The parts to run a segment in, or None where none of them may run by CPU kernels.

        Args:
            s: The segment.
            by_sizes: Whether an op differs that had other sizes, where no form of an op differs:
                padded arrays do not serve them.
        """
        site = self._site(s)
        nodes = s.nodes
        if len(nodes) == 1:
            return [(0, 1, True)] if _may_run_on_host(s, nodes[0]) else None
        differs = self._differing(s, site)
        if by_sizes and not any(differs):
            differs = self._resized(s, site)
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
        combines = [n.name == _COMBINE for n in nodes]
        kinds = list(zip(on_host, differs, combines))
        bounds = [i for i in range(len(nodes)) if i == 0 or kinds[i] != kinds[i - 1]]
        return [(i, j, on_host[i]) for i, j in pairwise([*bounds, len(nodes)])]

    def to_warn_of(self, s: Segment, parts: list[Part] | None) -> tuple[Node, int] | None:
        """The op to warn of, and how many programs its line has; None for a line that had it.

        Parts are no segments of the user's.
        """
        site = self._site(s)
        if s.cut == PART or site.warned:
            return None
        site.warned = True
        on_host = [n for i, j, is_host in parts or () if is_host for n in s.nodes[i:j]]
        differing = [n for n, d in zip(s.nodes, self._differing(s, site)) if d]
        with_line = (n for n in [*on_host, *differing] if n.line)
        return next(with_line, s.nodes[-1]), site.programs

    def _site(self, s: Segment) -> _Site:
        key = _key(s)
        site = self._sites.setdefault(key, _Site())
        self._sites.move_to_end(key)
        while len(self._sites) > _MOST_SITES:
            self._sites.popitem(last=False)
        return site

    def _differing(self, s: Segment, site: _Site) -> list[bool]:
        _read(site)
        differs = differing(_forms(s), list(site.ops))
        refused = set(site.refused)
        return [d or n.label in refused for d, n in zip(differs, s.nodes)]

    def _resized(self, s: Segment, site: _Site) -> list[bool]:
        forms, sizes = _forms(s), _sizes(s)
        others = [z for f, z in zip(list(site.ops), list(site.sizes)) if f == forms]
        return [any(z[i] != n for z in others) for i, n in enumerate(sizes)]


def _is_alike(forms: Counter[int], others: Counter[int]) -> bool:
    """Return whether half of a segment's ops are another's, or all are, as of a longer loop."""
    return 2 * (forms & others).total() >= forms.total() or forms.keys() <= others.keys()


def _may_run_on_host(s: Segment, node: Node) -> bool:
    is_small = nbytes(s, (*node.operands, *node.outputs)) <= SMALL
    return BuildContext.may_run_on_host(node, products=is_small)


def _key(s: Segment) -> tuple[bool, str, str]:
    # What combines the words of checks has no line.
    last = next((n for n in reversed(s.nodes) if n.line), s.nodes[-1])
    return s.cut == PART, last.line, last.name


def _count(site: _Site) -> int:
    """Number of programs, those of a form on padded arrays as few: buckets have their own limit."""
    return sum(
        max(n - _BUCKETS + 1, 1) if form in site.padded else n for form, n in site.forms.items()
    )


def _read(site: _Site) -> None:
    while site.unread:
        s = site.unread.popleft()
        form = PaddedPrograms.digest_of(s)
        site.ops.append(_forms(s))
        site.sizes.append(_sizes(s))
        site.forms[form] += 1
        if left := site.allowed.get(form):
            site.allowed[form] = left - 1


def _forms(s: Segment) -> array[int]:
    return array(
        "q",
        [
            hash(n.name if n.name == _COMBINE else (n.name, PaddedPrograms.form_of(n)))
            for n in s.nodes
        ],
    )


def _sizes(s: Segment) -> array[int]:
    return array("q", [hash((n.name, PaddedPrograms.sizes_of(n))) for n in s.nodes])


def _runs(values: Sequence[bool], kind: bool) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of a value."""
    start = 0
    for value, run in groupby(values):
        length = len(list(run))
        if value is kind:
            yield start, start + length
        start += length

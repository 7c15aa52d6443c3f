"""The programs of segments that end at one line: their number, forms and latest ops."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from tpu_core.extend import PaddedPrograms, Segment
from tpu_eager.costs import compile_seconds

COMBINE = "tpu.combine_words.default"
# Why a part of a segment ends, as op_by_op.cpp has it.
PART = "part of a segment that varies"

_BUCKETS = 4  # programs of a form that count as one: two of sizes, two padded ones
_MOST_COMPARED = 8  # latest programs of a line
_MOST_UNREAD = 64


@dataclass(slots=True)
class Streak:
    """Number of times that the same came in a row."""

    what: str = ""
    length: int = 0

    def add(self, what: str) -> int:
        self.length = self.length + 1 if what == self.what else 1
        self.what = what
        return self.length


@dataclass(slots=True)
class LinePrograms:
    """The programs of segments that end at one line.

    Attributes:
        programs: Number of them.
        unread: Those that are not among the following. Describing a training step takes as long
            as recording it, and most lines never come to the limit.
        ops: Of the latest ones, the form of each op: a hash of its arguments without sizes.
        sizes: The same with sizes.
        forms: Number of programs by the digest of their form.
        padded: Forms that padded arrays serve.
        longest: Estimate of the longest time to compile one of them, in seconds.
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
    longest: float = 0.0
    refused: set[str] = field(default_factory=set)
    allowed: dict[str, int] = field(default_factory=dict)
    key: Streak = field(default_factory=Streak)
    form: Streak = field(default_factory=Streak)
    counts: OrderedDict[str, int] = field(default_factory=OrderedDict)
    runs: int = 0
    warned: bool = False

    def add(self, s: Segment) -> None:
        """Count a program."""
        self.programs += 1
        # Now: a graph in it may be gone later.
        self.longest = max(self.longest, compile_seconds(s.nodes))
        self.unread.append(s)

    def read(self) -> None:
        """Describe the programs that were not described yet."""
        while self.unread:
            s = self.unread.popleft()
            form = PaddedPrograms.digest_of(s)
            self.ops.append(forms_of(s))
            self.sizes.append(sizes_of(s))
            self.forms[form] += 1
            if left := self.allowed.get(form):
                self.allowed[form] = left - 1

    def count(self) -> int:
        """Number of programs, those of a form on padded arrays as few: buckets have their own
        limit.
        """
        return sum(
            max(n - _BUCKETS + 1, 1) if form in self.padded else n for form, n in self.forms.items()
        )

    def is_alike(self, forms: Counter[int]) -> bool:
        """Return whether half of a segment's ops are a program's of this line, or all are, as of a
        longer loop.

        Args:
            forms: Of the segment's ops.
        """
        self.read()
        return any(
            2 * (forms & others).total() >= forms.total() or forms.keys() <= others.keys()
            for others in map(Counter, self.ops)
        )

    def take_over(self, other: LinePrograms) -> None:
        """Count the programs of another line as this one's."""
        self.programs, self.longest, self.warned = other.programs, other.longest, True
        self.ops.extend(other.ops)
        self.sizes.extend(other.sizes)
        self.forms.update(other.forms)
        self.padded |= other.padded
        self.refused |= other.refused


def forms_of(s: Segment) -> array[int]:
    """For each op a hash of its arguments without sizes."""
    return array(
        "q",
        [
            hash(n.name if n.name == COMBINE else (n.name, PaddedPrograms.form_of(n)))
            for n in s.nodes
        ],
    )


def sizes_of(s: Segment) -> array[int]:
    """For each op a hash of its sizes."""
    return array("q", [hash((n.name, PaddedPrograms.sizes_of(n))) for n in s.nodes])

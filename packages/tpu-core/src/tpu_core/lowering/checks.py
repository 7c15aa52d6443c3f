"""Checks beside lowerings: what a program finds out about values that PyTorch's kernels reject.

XLA cannot raise. So a program whose ops are checked has one output more, a word of two integers:
which check failed, counted from 1, or 0 if none did, and the value that is to blame. The next read
of the device looks at it (``csrc/recorder/checks.h``, `tpu_core.recorder.checked`).

A check is a function with the arguments of the op's lowering, and with what that returned where it
has a parameter ``result``. It yields a `Finding` for each thing that may be wrong. It is traced
with the lowering, and again where the word says that something is: the error's text follows from
shapes and the value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast
from tpu_core.lowering.registry import lowering
from tpu_core.pjrt.jax_compat import current_trace

OFF, DEFAULT, ALL = range(3)
"""Levels, of which the extension knows the numbers: see ``TPU_CHECKS``."""

# The place of a node among those of a word stands above the number of its check
# (csrc/recorder/checks.cpp).
_NODE_SHIFT = 20
# More words are searched for the first that says something; fewer are compared one by one.
_MANY = 64
WORD = jax.ShapeDtypeStruct((2,), np.int64)


@dataclass(frozen=True, slots=True)
class Finding:
    """A possible error in an op's values.

    Attributes:
        bad: Whether it is: a boolean of no dims.
        value: An integer to name in the error.
        error: The error, from that integer.
    """

    bad: Any
    value: Any
    error: Callable[[int], Exception]


CheckFunction = Callable[..., Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A check as it was declared.

    Attributes:
        fn: The function.
        level: The least level that has it.
        applies: Whether it has anything to look at in a call, from the call's `NodePlan`.
        takes_result: Whether ``fn`` takes ``result``.
    """

    fn: CheckFunction
    level: int
    applies: Callable[[Any], bool]
    takes_result: bool


CHECKS: dict[str, Entry] = {}


def has_indices(plan: Any) -> bool:
    """True if a call has an integer tensor with elements; those of 8 bits are masks."""
    return any(
        a.dtype.kind in "iu" and a.dtype.itemsize > 1 and 0 not in a.sizes for a in plan.reads
    )


def has_elements(plan: Any) -> bool:
    """True if every tensor of a call has elements."""
    return all(0 not in a.sizes for a in plan.reads)


def check(
    *ops: str, level: int = DEFAULT, applies: Callable[[Any], bool] = has_indices
) -> Callable[[CheckFunction], CheckFunction]:
    """Declare the check of functional overloads.

    Args:
        ops: Full names of overloads (``"aten.take.default"``).
        level: The least level that has it.
        applies: Whether it has anything to look at in a call. It sees the call's `NodePlan`, and
            nothing is traced for it: a program that is there already needs no trace.
    """

    def decorate(fn: CheckFunction) -> CheckFunction:
        takes_result = "result" in inspect.signature(fn).parameters
        for op in ops:
            CHECKS[op] = Entry(fn, level, applies, takes_result)
        return fn

    return decorate


def has_check(op: str, level: int) -> bool:
    """True if calls of an overload may be checked at a level."""
    found = CHECKS.get(op)
    return found is not None and found.level <= level


class Findings:
    """Results of the checks of one node while it is traced.

    Args:
        level: At which level to check.

    Attributes:
        level: The same.
        found: The op, the shapes of its tensors, and what may be wrong with it, in order.
    """

    def __init__(self, level: int) -> None:
        self.level, self._trace = level, current_trace()
        self.found: list[tuple[str, list[Any], Finding]] = []

    def add(self, op: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Check a call, unless it is inside a loop that has no `BodyChecks`."""
        entry = CHECKS[op]
        if entry.level > self.level or not self.is_here():
            return
        tensors = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        avals = [jax.typeof(x) for x in tensors]
        if entry.takes_result:
            kwargs = {**kwargs, "result": result}
        self.found += [(op, avals, finding) for finding in entry.fn(*args, **kwargs)]

    def is_here(self) -> bool:
        """True if values of the trace in progress can be outputs of the node."""
        return current_trace() is self._trace

    def word(self) -> jax.Array:
        """The word of the node: its first check that failed."""
        code, value = np.int64(0), np.int64(0)
        for i, (_, _, finding) in reversed(list(enumerate(self.found, 1))):
            code = jnp.where(finding.bad, np.int64(i), code)
            value = jnp.where(finding.bad, jnp.asarray(finding.value, np.int64), value)
        return jnp.stack([jnp.asarray(code), jnp.asarray(value)])


_current: ContextVar[Findings | None] = ContextVar("tpu_findings", default=None)


@contextmanager
def checking(level: int) -> Iterator[Findings]:
    """Have the lowerings that are called in the block checked."""
    findings = Findings(level)
    token = _current.set(findings)
    try:
        yield findings
    finally:
        _current.reset(token)


def _nothing_of_its_own(*_: Any, **__: Any) -> Iterator[Finding]:
    return iter(())


class BodyChecks:
    """Checks inside the bodies of one loop, or the branches of one conditional.

    No value from inside is an output of the program, so the word goes round with what the loop
    carries, and what it says becomes findings of the trace around it. An op whose lowering uses
    them is declared, by `declare`.

    Example:
        >>> checks = BodyChecks()
        >>> def step(state, x):
        ...     return checks.run(state[0], lambda: body(state[1], x))
        >>> word, last = lax.fori_loop(0, 8, lambda i, s: step(s, i), (checks.start(), first))
        >>> checks.report(word)
    """

    def __init__(self) -> None:
        findings = _current.get()
        self._outer = findings if findings is not None and findings.is_here() else None
        self._found: dict[int, list[tuple[str, list[Any], Finding]]] = {}

    @staticmethod
    def declare(op: str) -> None:
        """Declare an op whose lowering calls others that may be checked, inside `BodyChecks`.

        Args:
            op: The overload, ``"mylib.loop.default"``; its lowering is registered with `register`.

        Example:
            >>> BodyChecks.declare("mylib.loop.default")
        """
        check(op, applies=has_elements)(_nothing_of_its_own)

    @staticmethod
    def declare_range(
        op: str, integers: Callable[..., tuple[Any, int]], error: Callable[[int], Exception]
    ) -> None:
        """Declare that integers of an op are to be in range; the next read raises if not.

        `TPU_CHECKS` switches it off.

        Args:
            op: The overload; its lowering is registered with `register`.
            integers: Called as the lowering; gives integers, and the number that all are to be
                below.
            error: The error, from an integer that is negative or too large.

        Example:
            >>> def rows(x, index):
            ...     return index, x.shape[0]
            >>> BodyChecks.declare_range("mylib.pick.default", rows, lambda i: IndexError(f"{i}"))
        """

        def found(*args: Any, **kwargs: Any) -> Iterator[Finding]:
            values, bound = integers(*args, **kwargs)
            yield from out_of_range(values, 0, bound, error)

        check(op)(found)

    def start(self) -> jax.Array | None:
        """The word before the first round; None, which holds no array, where nothing is checked."""
        return None if self._outer is None else jnp.zeros(WORD.shape, WORD.dtype)

    def has_any(self, body: Callable[[], Any]) -> bool:
        """True if anything in a body is checked; it is traced on shapes alone."""
        if self._outer is None:
            return False
        level, found = self._outer.level, False

        def probe() -> None:
            nonlocal found
            with checking(level) as findings:
                body()
            found = bool(findings.found)

        jax.eval_shape(probe)
        return found

    def run(
        self, word: jax.Array | None, body: Callable[[], Any], place: int = 0
    ) -> tuple[jax.Array | None, Any]:
        """The word after a body, and the body's results.

        Args:
            word: The word before it.
            body: Calls lowerings.
            place: Number of the body among those of a conditional.
        """
        if self._outer is None or word is None:
            return None, body()
        with checking(self._outer.level) as findings:
            results = body()
        self._found[place] = findings.found  # of the last trace, where JAX makes several
        if not findings.found:
            return word, results
        new = findings.word()
        if place:
            new = jnp.where(new[:1] != 0, new + np.array([place << _NODE_SHIFT, 0]), new)
        return jnp.where(word[:1] != 0, word, new), results

    def report(self, word: jax.Array | None) -> None:
        """Have the program say what the word after the last round says."""
        if self._outer is None or word is None:
            return
        for place, found in self._found.items():
            for i, (op, avals, inner) in enumerate(found, 1):
                bad = word[0] == np.int64((place << _NODE_SHIFT) + i)
                self._outer.found.append((op, avals, Finding(bad, word[1], inner.error)))


def note(op: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Check a call of an overload's lowering, if asked to."""
    if op in CHECKS and (findings := _current.get()) is not None:
        findings.add(op, args, kwargs, result)


@lowering("tpu.combine_words.default")
def combine_words(words: list[jax.Array]) -> jax.Array:
    """The first of several words that says that something is wrong, with its place among them."""
    if len(words) <= _MANY:
        found = words[-1] + np.array([(len(words) - 1) << _NODE_SHIFT, 0])
        for place, word in reversed(list(enumerate(words[:-1]))):
            moved = word + np.array([place << _NODE_SHIFT, 0])
            found = jnp.where(word[:1] != 0, moved, found)
        return jnp.where(found[:1] & ((1 << _NODE_SHIFT) - 1) != 0, found, np.int64(0))
    rows = jnp.stack(words)
    first = jnp.argmax(rows[:, 0] != 0)
    row = rows[first]
    place = jnp.where(row[0] != 0, first << _NODE_SHIFT, np.int64(0))
    return row + jnp.stack([place, jnp.zeros_like(place)])


def out_of_range(
    index: jax.Array,
    low: int,
    high: int,
    error: Callable[[int], Exception],
    counted: jax.Array | None = None,
    wraps: bool = False,
) -> Iterator[Finding]:
    """A finding for an element that is outside of [low, high): a negative one if there is one.

    Args:
        index: Integers.
        low, high: Bounds of the range.
        error: The error, from the element.
        counted: Mask of the elements that count; all unless given.
        wraps: Whether ``high`` elements below are in range, too; ``low`` is 0 then.
    """
    if index.size == 0:
        return
    # One maximum, as each reduction is a kernel to compile: what is below is large without a sign.
    # No constant is negative: on padded arrays it may be a size.
    shift = high if wraps else -low
    index = index.astype(np.int64)
    if counted is not None:
        index = jnp.where(counted, index, np.int64(low))
    shifted = index + cast(shift, np.int64) if shift else index
    most = jnp.max(shifted.astype(np.uint64))
    bad = most >= cast(high + shift, np.uint64)
    yield Finding(bad, most.astype(np.int64) - cast(shift, np.int64), error)


def fixed(kind: Callable[[str], Exception], text: str) -> Callable[[int], Exception]:
    """An error that names no value."""
    return functools.partial(_fixed, kind, text)


def _fixed(kind: Callable[[str], Exception], text: str, _: int) -> Exception:
    return kind(text)

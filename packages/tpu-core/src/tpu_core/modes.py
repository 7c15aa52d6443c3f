"""Eager modes: a mode is where a trace is cut and whether to wait.

tpu_core knows Strict; other packages add modes by the entry-point group ``tpu_core.modes``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from tpu_core.config import config
from tpu_core.errors import ConfigurationError

Inspect = Callable[[Any, list[Any], list[Any]], None]
Fill = Callable[[Any, Callable[[str, int, int], None]], None]
ProviderFactory = Callable[[Any], Any]
"""Makes a `tpu_core.compiler.providers.ProgramProvider` of a `BuildContext`."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Execution mode of ops outside ``torch.compile``.

    Attributes:
        name: ``"strict"``, ...
        max_ops: The trace is cut when it has so many ops; None reads ``TPU_SEGMENT_OPS``.
        wait: Wait for each segment before going on.
        cut_after_optimizer_step: Cut where a training step ends.
        cut_at_repetitions: Cut a loop that nothing else cuts once a round, or every few rounds
            where they are short, at the same place in each, rather than at every ``max_ops`` ops.
        providers: Make the policies that are asked, in this order, for the program of a segment
            that has none in memory, before it is compiled as it was recorded: each is called with a
            `BuildContext` and gives a `ProgramProvider`.
        fill: Compiles common ops ahead, for ``tpu cache warm --ops``: called with dtypes, none of
            them for those of its own choice, and a function to be called with a text, the number of
            programs made, and of those to make.
        inspect: Called with (segment, arrays of its inputs, arrays of its live slots) once it has
            run, or None. Where it is set, no input is donated. What it raises reaches the user.

    Example:
        >>> Mode("by_fours", max_ops=4)  # an entry point of the group tpu_core.modes
    """

    name: str
    max_ops: int | None
    wait: bool = False
    cut_after_optimizer_step: bool = False
    cut_at_repetitions: bool = False
    providers: tuple[ProviderFactory, ...] = ()
    inspect: Inspect | None = None
    fill: Fill | None = None

    def native(self) -> tuple[int, bool, Inspect | None, bool, tuple[ProviderFactory, ...] | None]:
        """The extension's form of the mode."""
        bound = config().segment_ops if self.max_ops is None else self.max_ops
        return (bound, self.wait, self.inspect, self.cut_at_repetitions, self.providers or None)


STRICT = Mode("strict", max_ops=1)


@functools.cache
def _installed() -> dict[str, Any]:
    return {e.name: e for e in entry_points(group="tpu_core.modes")}


def names() -> list[str]:
    """Names of the modes that are installed."""
    return sorted([STRICT.name, *_installed()])


@functools.cache
def find(name: str) -> Mode:
    """The mode of a name.

    Raises:
        ConfigurationError: No installed package has it, or its entry point names no mode.
    """
    if name == STRICT.name:
        return STRICT
    entry = _installed().get(name)
    if entry is None:
        raise ConfigurationError(
            f"There is no eager mode '{name}'; installed are {', '.join(names())}.",
            remedy="Modes 'debug' and 'fused' come with the package tpu-eager, others by an entry "
            "point of the group 'tpu_core.modes'.",
        )
    mode = entry.load()
    if not isinstance(mode, Mode):
        raise ConfigurationError(
            f"The entry point '{name}' = '{entry.value}' names no tpu_core.extend.Mode.",
            values={"found": type(mode).__name__},
            remedy="Have it name an instance: Mode('by_fours', max_ops=4).",
        )
    return mode


def default() -> Mode:
    """The mode of ``TPU_EAGER_MODE``, else Fused where it is installed, else Strict."""
    name = config().eager_mode or ("fused" if "fused" in _installed() else "strict")
    return find(name)


_current: Mode | None = None


def current() -> Mode:
    """The process' mode (a thread may override it with `using`)."""
    return _current or default()


def set_mode(mode: str | Mode) -> None:
    """Set the process' mode. Ops already recorded keep their order."""
    from tpu_core import _C

    global _current
    _current = find(mode) if isinstance(mode, str) else mode
    _C.flush("change of eager mode")
    _C.set_default_mode(_current.native())


class _Blocks(threading.local):
    """Modes of the `using` blocks that a thread is in."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []


_blocks = _Blocks()


@contextmanager
def using(mode: str | Mode) -> Iterator[None]:
    """Run a block of this thread in another mode."""
    from tpu_core import _C

    chosen = find(mode) if isinstance(mode, str) else mode
    before = _C.thread_mode()
    _C.flush("change of eager mode")
    _C.set_thread_mode(chosen.native())
    _blocks.modes.append(chosen)
    try:
        yield
    finally:
        _blocks.modes.pop()
        _C.flush("change of eager mode")
        _C.set_thread_mode(before)


def active() -> Mode:
    """The innermost mode in force in this thread."""
    return _blocks.modes[-1] if _blocks.modes else current()


def after_optimizer_step(*_: Any) -> None:
    """Global hook of ``torch.optim``: a training step ends here."""
    from tpu_core import _C

    if _C.is_initialized() and active().cut_after_optimizer_step:
        _C.flush("optimizer step")

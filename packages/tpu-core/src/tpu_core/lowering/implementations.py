"""Implementations that other packages offer for ops which have a lowering.

A package names an overload in the entry-point group ``tpu_core.kernels``; what is loaded from there
is a `Kernel`. It is asked each time the op is lowered for a TPU, or for any platform where the user
has named an implementation, and gives a function that is called as the lowering would be. What it
gives must compute the same: forward and backward may be of different implementations.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

import jax

from tpu_core import platforms
from tpu_core.cache.sources import package_digest
from tpu_core.config import config
from tpu_core.lowering.operand_sharding import OperandSharding
from tpu_core.lowering.registry import Lowering
from tpu_core.metrics import METRICS, KernelChoice

GROUP = "tpu_core.kernels"

Choices = tuple[tuple[str, str], ...]
"""Implementations that the user named: (name of the kernel, of its implementation), sorted."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a lowering.

    Attributes:
        platform: ``"tpu"``, ``"cpu"``, another PJRT platform, or ``"portable"`` for several.
        devices: Number of devices among which XLA divides the program.
        kind: Generation of the chips (``"TPU v5e"``), where it is known.
        division: Of kernels' operands, in a program for several devices; None where they are not
            divided.
        pads: Whether the program is one on padded arrays, which take no kernel of Pallas.

    Example:
        >>> with Target("tpu", devices=4, kind="TPU v5e").applied():
        ...     lowered = jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
    """

    platform: str
    devices: int = 1
    kind: str | None = None
    division: OperandSharding | None = None
    pads: bool = False

    @staticmethod
    def current() -> Target:
        """Target of the current lowering; defaults to one device of the process's platform.

        Example:
            >>> Target.current().platform
            'cpu'
        """
        if (given := _target.get()) is not None:
            return given
        platform = platforms.Platform.resolve()
        return Target(platform.name, kind=platform.device_kind_hint)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lower for this target in the block."""
        token = _target.set(self)
        try:
            yield
        finally:
            _target.reset(token)


class Kernel(Protocol):
    """An implementation found by entry point.

    Example:
        >>> class Silu:
        ...     name = "my_silu"
        ...
        ...     def choose(self, overload, args, kwargs, target, choice):
        ...         return None if choice == "plain" else silu_by_pallas
    """

    name: str

    def choose(
        self,
        overload: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Target,
        choice: str | None,
    ) -> Callable[..., Any] | None:
        """The function to call in place of the op's lowering, or None for the lowering.

        Args:
            overload: The op.
            args, kwargs: As the lowering would be called.
            target: The target of the choice.
            choice: The implementation that the user named, or None.
        """


@dataclass(frozen=True, slots=True)
class KernelSelection:
    """A call that an implementation of a kernel was chosen for.

    Static methods concern the choice itself: implementations that the user named, and the files by
    which an implementation is tuned.

    Attributes:
        kernel: Name of the op.
        implementation: Name of the implementation.
        why: Reason why it is not one that would be tried before it; empty where none would be.

    Example:
        >>> KernelSelection("attention", "plain", "the heads are not multiples of 8").note()
    """

    kernel: str
    implementation: str
    why: str = ""

    def note(self) -> None:
        """Say that it was chosen; called by kernels.

        Example:
            >>> KernelSelection("attention", "pallas").note()
        """
        if (uses := _uses.get()) is not None:
            uses.append(self)

    def report(self, line: str | None = None) -> None:
        """Count it among the choices of `torch.tpu.compile_report`.

        Args:
            line: The user's line.

        Example:
            >>> KernelSelection("cross_entropy", "without logits").report("train.py:12")
        """
        METRICS.kernel(KernelChoice(self.kernel, self.implementation, self.why, line))

    @staticmethod
    @contextmanager
    def recording() -> Iterator[list[KernelSelection]]:
        """A list to which the selections in the block are added, for reports.

        Example:
            >>> with KernelSelection.recording() as uses:
            ...     jax.jit(f).trace(x).lower()
            >>> uses
            [KernelSelection(kernel='attention', implementation='pallas', why='')]
        """
        uses: list[KernelSelection] = []
        token = _uses.set(uses)
        try:
            yield uses
        finally:
            _uses.reset(token)

    @staticmethod
    def named() -> dict[str, str]:
        """Implementations that the user named when the op was recorded, or now, by kernel.

        Example:
            >>> KernelSelection.named().get("attention")
            'pallas'
        """
        return dict(choices())

    @staticmethod
    @contextmanager
    def using(named: Mapping[str, str]) -> Iterator[None]:
        """Have kernels computed by named implementations in a block.

        It holds for the process, as `torch.nn.attention.sdpa_kernel` does: a backward pass runs on
        threads of its own. ``tpu_kernels.using`` is its public form.

        Args:
            named: Implementation by name of the kernel; others stay as they are around the block.

        Example:
            >>> with KernelSelection.using({"attention": "plain"}):
            ...     loss = step(batch)
        """
        from tpu_core import _C

        after = tuple(sorted({**dict(choices()), **named}.items()))
        before = choose_for_process(after)
        _C.set_implementations(digest(after))
        try:
            yield
        finally:
            choose_for_process(before)
            _C.set_implementations(digest(before))

    @staticmethod
    def tuned_folder() -> Path:
        """The folder of the user's cache with results of tuning; it need not exist.

        Its JSON files are part of the keys of programs.

        Example:
            >>> (KernelSelection.tuned_folder() / "costs.json").exists()
            False
        """
        return config().cache_dir / "tuned"


_target: ContextVar[Target | None] = ContextVar("tpu_lowering_target", default=None)
_recorded: ContextVar[Choices | None] = ContextVar("tpu_recorded_choices", default=None)
_uses: ContextVar[list[KernelSelection] | None] = ContextVar("tpu_uses_of_kernels", default=None)
_of_process: Choices = ()


def lower_for_target(function: Callable[..., Any], *avals: Any) -> Any:
    """Lower a JAX function with ``jax.jit`` for the target, keeping all of its arguments.

    Example:
        >>> with Target("tpu").applied():
        ...     lowered = lower_for_target(lambda x: x + 1, jax.ShapeDtypeStruct((4,), np.float32))
    """
    traced = jax.jit(function, keep_unused=True).trace(*avals)
    # Without a platform it would be that of jax's first device, which may be a GPU beside the CPU.
    return traced.lower(lowering_platforms=(Target.current().platform,))


def choices() -> Choices:
    """Implementations that the user named when the op was recorded, or now."""
    recorded = _recorded.get()
    return _of_process if recorded is None else recorded


@contextmanager
def as_recorded(choices: Choices) -> Iterator[None]:
    """Lower with the choices of the time when an op was recorded."""
    token = _recorded.set(choices)
    try:
        yield
    finally:
        _recorded.reset(token)


def choose_for_process(choices: Choices) -> Choices:
    """Set what the process chooses; returns what it was. Not for users: signatures must follow."""
    global _of_process
    before, _of_process = _of_process, choices
    return before


def digest(choices: Choices) -> int:
    """64 bits that stand for choices, the same in every process; 0 for none."""
    if not choices:
        return 0
    return int.from_bytes(hashlib.sha256(repr(choices).encode()).digest()[:8], "little")


def implementation(
    entry: Lowering, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function that computes a call of an op: its lowering's, or that of a kernel.

    Args:
        entry: The op's lowering.
        args, kwargs: Arguments of the call.
    """
    point = _offered().get(entry.op)
    if point is None:
        return entry.fn
    chosen, where = dict(choices()), Target.current()
    if where.platform != "tpu" and not chosen:
        return entry.fn
    kernel: Kernel = point.load()
    function = kernel.choose(entry.op, args, kwargs, where, chosen.get(kernel.name))
    return function or entry.fn


@contextmanager
def for_padded_arrays() -> Iterator[None]:
    """Lower for a program on padded arrays in the block."""
    with replace(Target.current(), pads=True).applied():
        yield


@functools.cache
def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@functools.cache
def sources() -> str:
    """Digest of the packages that offer implementations, and of what these were tuned to.

    Programs of others are not theirs.
    """
    found = hashlib.sha256()
    for table in sorted(KernelSelection.tuned_folder().glob("*.json")):
        found.update(table.read_bytes())
    for package in sorted({point.module.partition(".")[0] for point in _offered().values()}):
        found.update(package_digest(package).encode())
    return found.hexdigest()

"""Ops of the library: implementations, their rules, and the selection among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from tpu_core.errors import KernelRuleError
from tpu_core.extend import KernelSelection, Target


class Arguments(Protocol):
    """Arguments that the rules of an op check."""

    @property
    def dtype(self) -> str:
        """Of the tensors that the op computes with."""

    def describe(self) -> dict[str, object]:
        """Shapes and options, for messages."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Requirement of an implementation on the arguments.

    Attributes:
        text: A sentence that is true where the rule holds, for messages and the docs.
        holds: Called with the op's arguments and the target.
    """

    text: str
    holds: Callable[[Any, Target], bool]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: As in `tpu_kernels.using`.
        summary: Summary for the docs.
        platforms: Platforms that choose it by themselves; empty stands for all. Named by the
            user, it runs everywhere, kernels by the interpreter.
        dtypes: Dtypes of its operands; empty stands for all.
        rules: Further conditions on a call.
        functions: For each overload the function to call in place of its lowering. An overload
            that is absent keeps its lowering.
    """

    name: str
    summary: str
    platforms: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def broken(self, arguments: Arguments, target: Target) -> str | None:
        """The first rule that does not hold, or None; the platform is no rule."""
        if self.dtypes and arguments.dtype not in self.dtypes:
            return f"The dtype is {' or '.join(self.dtypes)}, the same for all tensors."
        rules = (rule.text for rule in self.rules if not rule.holds(arguments, target))
        return next(rules, None)


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the library: what `tpu_core.lowering.implementations` asks which function to call.

    Attributes:
        name: As in `tpu_kernels.using`.
        called: The PyTorch functions that lead to it.
        bind: For each overload, what makes the op's arguments of those of the overload.
        implementations: In the order in which they are tried; the last takes everything.
        is_small: Whether a call takes little memory without the kernels of one platform, which
            programs on padded arrays cannot have.
    """

    name: str
    called: tuple[str, ...]
    bind: Mapping[str, Callable[..., Arguments]]
    implementations: tuple[Implementation, ...]
    is_small: Callable[[Any], bool] = lambda arguments: True

    def find(self, name: str) -> Implementation:
        """The implementation of a name.

        Raises:
            ValueError: There is none; names those there are.
        """
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        names = ", ".join(repr(i.name) for i in self.implementations)
        raise ValueError(f"{self.name} has no implementation '{name}'. It has {names}.")

    def select(self, arguments: Arguments, target: Target, choice: str | None) -> Implementation:
        """The implementation for a call.

        Args:
            arguments: The call's.
            target: Target of the lowering.
            choice: The implementation that the user named, or None.

        Raises:
            KernelRuleError: The named one does not take the arguments; says which rule they break.
        """
        if choice is not None:
            named = self.find(choice)
            if (rule := named.broken(arguments, target)) is not None:
                raise KernelRuleError(
                    f"The implementation '{choice}' of {self.name} does not take these arguments.",
                    values={"its rule": rule, **arguments.describe(), "devices": target.devices},
                )
            return named
        return next(
            i for i in self._tried(arguments, target) if i.broken(arguments, target) is None
        )

    def _tried(self, arguments: Arguments, target: Target) -> Iterator[Implementation]:
        pads = target.pads and self.is_small(arguments)
        for i in self.implementations:
            if not i.platforms or (target.platform in i.platforms and not pads):
                yield i

    def choose(
        self,
        overload: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Target,
        choice: str | None,
    ) -> Callable[..., Any] | None:
        """See `tpu_core.lowering.implementations.Kernel`."""
        arguments = self.bind[overload](*args, **kwargs)
        found = self.select(arguments, target, choice)
        why = "it is named" if choice else self._why_not_before(found, arguments, target)
        KernelSelection(self.name, found.name, why).note()
        return found.functions.get(overload)

    def _why_not_before(self, found: Implementation, arguments: Arguments, target: Target) -> str:
        """The rules of those implementations that would be tried before another one."""
        before = self.implementations[: self.implementations.index(found)]
        rules = [
            f"{i.name}: {i.broken(arguments, target) or 'Arrays are not padded.'}"
            for i in before
            if not i.platforms or target.platform in i.platforms
        ]
        return " ".join(rules)

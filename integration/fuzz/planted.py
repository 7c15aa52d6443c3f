"""Faults that fuzzers must find: each breaks the program in a child process by replacing functions.

``python -m fuzz calls --plant mask --stop-at-first`` runs with one. A fault whose place is gone
raises: it is to be planted at the new one, not to be forgotten.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = ("tpu_core", "tpu_eager", "tpu_compile")


class PlaceIsGone(Exception):
    """What a planted fault replaces is not there any more."""


def found(module: str, path: str) -> tuple[Any, str, Any]:
    """The owner of an attribute, its last name and its value.

    Raises:
        PlaceIsGone: There is none.
    """
    try:
        owner: Any = importlib.import_module(module)
        *between, last = path.split(".")
        for name in between:
            owner = getattr(owner, name)
        return owner, last, getattr(owner, last)
    except (ImportError, AttributeError) as error:
        raise PlaceIsGone(f"{module}.{path}: {error}") from error


def replace(module: str, path: str, wrap: Callable[[Any], Any]) -> None:
    """Put ``wrap(original)`` where the original is, under every name that modules gave it."""
    owner, last, original = found(module, path)
    replacement = wrap(original)
    setattr(owner, last, replacement)
    for name, other in list(sys.modules.items()):
        if name.split(".")[0] in PACKAGES:
            for attribute, value in list(vars(other).items()):
                if value is original:
                    setattr(other, attribute, replacement)


def _unchecked() -> None:
    """The check of a padded program's first run sees nothing: the second line of defence."""
    replace("tpu_core.padding.check", "differences", lambda original: lambda *_: None)


def mask() -> None:
    """Padding takes part in reductions with whatever is in it."""
    _unchecked()
    replace(
        "tpu_core.padding.layout",
        "Space.mask",
        lambda original: lambda self, x, axes, value: x.array,
    )


def rule() -> None:
    """Rules of reductions ignore over which dims they are, and what holds them back is gone.

    Three places would refuse: the form that recordings share names the argument, parameters that a
    rule does not handle must be equal, and outlines and the first run are compared.
    """
    import copy

    _unchecked()

    def without_dim(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def plan_without_dim(plan: Any) -> Any:
            other = copy.copy(plan)
            other.template = [(n, k, None if n == "dim" else v) for n, k, v in plan.template]
            return original(other)

        return plan_without_dim

    replace("tpu_core.padding.recording", "_plan", without_dim)
    replace(
        "tpu_core.padding.family_signatures",
        "FamilySignatures.agree",
        lambda original: lambda *_: True,
    )
    handled = found("tpu_core.padding.interpret", "HANDLED")[2]
    names = [name for name in handled if name.startswith(("reduce_", "cum", "arg"))]
    if not names:
        raise PlaceIsGone("rules of reductions")
    for name in names:
        handled[name] |= {"axes", "axis"}


def key() -> None:
    """What is looked up for a call forgets the argument ``dim``."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        answers: dict[Any, Any] = {}

        def miss(op: Any, args: Any, reads: Any, writes: Any, packs: Any) -> Any:
            import torch

            def shown(a: Any) -> Any:
                if isinstance(a, torch.Tensor):
                    return ("tensor", a.dtype, tuple(a.shape), a.stride())
                if isinstance(a, (list, tuple)):
                    return tuple(map(shown, a))
                return repr(a)

            names = [a.name for a in op._schema.arguments]
            known = [shown(a) for n, a in zip(names, args) if n != "dim"]
            signature = repr((op, known, reads, writes, packs))
            if signature not in answers:
                answers[signature] = original(op, args, reads, writes, packs)
            return answers[signature]

        return miss

    replace("tpu_core.recorder.signature", "new_signature", wrap)


def donation() -> None:
    """A program takes the memory of inputs that are read again later."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def aliases(segment: Any, shape: Any = None) -> dict[int, int]:
            taken = dict(original(segment, shape))

            def kind_of(slot: int) -> Any:
                value = segment.slots[slot]
                return (shape(slot) if shape else value.shape), value.dtype

            for position, slot in enumerate(segment.inputs()):
                for i, result in enumerate(segment.live):
                    free = position not in taken and i not in taken.values()
                    if free and kind_of(slot) == kind_of(result):
                        taken[position] = i
            return taken

        return aliases

    replace("tpu_core.compiler.aliases", "aliases", wrap)


def substitution() -> None:
    """A program stands in for one of the same ops whose results of equal shapes are others."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        programs: dict[str, tuple[Any, Any]] = {}

        def build(self: Any, exported: dict[str, Any], *args: Any, **options: Any) -> Any:
            Segment = importlib.import_module("tpu_core.compiler.segment").Segment  # noqa: N806

            s = Segment.from_export(exported)
            nodes = [(id(n.plan), n.operands, n.outputs, n.numbers) for n in s.nodes]
            same = repr((nodes, s.slots, s.numbers, s.outputs(), s.donated))
            if same not in programs:
                # Plans are kept, so that no other has the id of one that is gone.
                plans = [n.plan for n in s.nodes]
                programs[same] = original(self, exported, *args, **options), plans
            return programs[same][0]

        return build

    replace("tpu_core.compiler.builder", "ProgramBuilder.build", wrap)


PLANTED: dict[str, Callable[[], None]] = {
    "rule": rule,
    "mask": mask,
    "key": key,
    "donation": donation,
    "substitution": substitution,
}


def apply(name: str) -> None:
    """Plant a fault in this process; before the device starts."""
    for module in ("runtime", "compiler.builder", "padding.bucketed_program", "padding.check"):
        importlib.import_module(f"tpu_core.{module}")
    PLANTED[name]()

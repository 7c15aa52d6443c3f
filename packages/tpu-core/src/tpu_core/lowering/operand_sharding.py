"""Kernels in programs that XLA divides among devices.

XLA divides what it knows the dimensions of; a kernel has to be told how its operands are divided,
before XLA has decided. So such a program is lowered twice. The first time each kernel's call is
written as ordinary ops, with marks at its operands, and Shardy, by which XLA will decide, says how
they come to be divided. The second time the kernels are called on the parts. Whatever the first
time says, the results are right: operands that come divided otherwise are brought into place.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from tpu_core.pjrt.shardings import propagated

Axes = tuple[str, ...]
_SCOPE = re.compile(r"divided\((\d+)\)")


class OperandSharding:
    """Shardings of kernels' operands over a mesh.

    Calls with one key are divided alike: a key names the op and the shapes of its operands.

    Args:
        mesh: The devices.

    Example:
        >>> division = OperandSharding(mesh)
        >>> with Target("tpu", mesh.size, division=division).applied():
        ...     division.learn(jax.jit(main).trace(*avals).lower(lowering_platforms=("tpu",)))
        ...     lowered = jax.jit(main).trace(*avals).lower(lowering_platforms=("tpu",))
    """

    def __init__(self, mesh: AbstractMesh) -> None:
        self.mesh = mesh
        self._places: dict[Hashable, int] = {}
        self._found: dict[int, list[list[Axes]]] | None = None

    @property
    def is_known(self) -> bool:
        """True if `learn` was called."""
        return self._found is not None

    @property
    def is_needed(self) -> bool:
        """True if anything was marked."""
        return bool(self._places)

    def probe(self, key: Hashable, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands of a call, to be used in its place, while they are being asked about."""
        place = self._places.setdefault(key, len(self._places))
        with jax.named_scope(f"divided({place})"):
            return list(jax.lax.optimization_barrier(tuple(arrays)))

    def learn(self, lowered: Any) -> None:
        """Read the marks of a program.

        Args:
            lowered: From ``jax.jit(...).trace(...).lower(...)``.
        """
        self._found = {}
        for name, axes in propagated(lowered, "stablehlo.optimization_barrier"):
            if (match := _SCOPE.search(name)) is not None:
                self._found.setdefault(int(match[1]), axes)

    def axes(self, key: Hashable) -> list[list[Axes]] | None:
        """For each operand of a call the axes that divide its dimensions; None where unknown."""
        return (self._found or {}).get(self._places.get(key, -1))

"""A graph of functional ATen ops that is ready to be recorded, and what it tells of its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tpu_compile.sizes import Sizes, Symbols
from tpu_compile.steps import Step
from tpu_core.padding.told import Dim, OpenSize, Shape


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor among inputs or results: of a step, with shape and strides in numbers and terms."""

    step: int
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that is ready to be recorded.

    Attributes:
        key: Hash of what it computes, the same in every process.
        steps: What it computes.
        once: The same with calls that repeat an earlier one left out.
        symbols: The sizes that it leaves open.
        tensors: Positions of its tensor inputs.
        sizes: Positions of its inputs that are sizes.
        given: Its tensor inputs.
        counts: Its inputs that are sizes, as numbers and terms.
        results: For each output a `Made`, or a number, a term or None.
        draws: Number of ops that draw random numbers.
        open: Its open sizes, for `tpu_core.padding.told`.
    """

    key: str
    steps: list[Step]
    once: list[Step]
    symbols: Symbols
    tensors: list[int]
    sizes: list[int]
    given: list[Made]
    counts: list[Any]
    results: list[Any]
    draws: int
    open: list[OpenSize] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "open", _open_sizes(self))

    def made(self) -> list[Made]:
        """Its results that are tensors."""
        return [r for r in self.results if isinstance(r, Made)]

    def values(self, numbers: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
        """Values of the open sizes in a call with these size inputs and tensor shapes."""
        return self.symbols.values(numbers, shapes)

    def holds(self, values: Sequence[int]) -> bool:
        """Whether the graph takes such values."""
        return self.symbols.hold(self._sizes(values))

    def numbers(self, values: Sequence[int]) -> list[int]:
        """The size inputs of a call with these values."""
        return list(self._sizes(values).all(self.counts))

    def operands(self, values: Sequence[int]) -> list[tuple[Shape, Shape]]:
        """Shape and strides of each tensor input."""
        sizes = self._sizes(values)
        return [(sizes.all(x.shape), sizes.all(x.strides)) for x in self.given]

    def shapes(self, values: Sequence[int]) -> list[Shape]:
        """Shape of each result that is a tensor."""
        sizes = self._sizes(values)
        return [sizes.all(x.shape) for x in self.made()]

    def _sizes(self, values: Sequence[int]) -> Sizes:
        return Sizes({size.symbol: n for size, n in zip(self.symbols.open, values, strict=True)})


def _open_sizes(graph: Graph) -> list[OpenSize]:
    found = []
    for size in graph.symbols.open:
        results = [
            Dim(i, d)
            for i, made in enumerate(graph.made())
            for d, n in enumerate(made.shape)
            if getattr(n, "expression", None) == size.symbol
        ]
        operands = tuple(Dim(*d) for d in size.dims)
        found.append(
            OpenSize(size.origin, size.low, size.high, size.varies, operands, tuple(results))
        )
    return found

"""A graph of functional ATen ops that is ready to be recorded, and what it tells of its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile.call_numbers import CallNumbers
from tpu_compile.fx_utils import subgraphs
from tpu_compile.inner_sizes import InnerSizes
from tpu_compile.rng import Seeds
from tpu_compile.sizes import Sizes, Symbols
from tpu_compile.unbacked import Bounded
from tpu_core.extend import Dim, DynamicSize

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that is ready to be recorded.

    Attributes:
        key: Hash of what it computes, the same in every process.
        module: The graph.
        symbols: The sizes that it leaves open.
        count: Number of its inputs.
        tensors: Positions of its tensor inputs.
        sizes: Positions of its inputs that are sizes.
        passed: The numbers that a call passes to its program.
        inputs: All its integers as symbols, the host's sizes of the results' among them.
        integers: Positions of those.
        given: Its tensor inputs, as fake tensors.
        counts: Its inputs that are sizes, symbolic or not.
        inner: Sizes of tensors inside of it that are no sum or product of others.
        results: For each output the node, a number, or None.
        made: For each output whether the program returns it.
        seeds: Words of the ops that draw random numbers.
        same: Calls of the form of an earlier one, with that one.
        bounded: The computation of its sizes, if they are computed.
        open: Its open sizes, for `tpu_core.extend.register_graph_op`.
        ops: Names of its ops, those of its subgraphs among them.
    """

    key: str
    module: GraphModule
    symbols: Symbols
    count: int
    tensors: list[int]
    sizes: list[int]
    passed: CallNumbers
    inputs: Symbols
    integers: list[int]
    given: list[torch.Tensor]
    counts: list[Any]
    inner: InnerSizes
    results: list[Any]
    made: list[bool]
    seeds: Seeds
    same: dict[Node, Node]
    bounded: Bounded | None = None
    open: list[DynamicSize] = field(init=False)
    ops: list[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "open", _open_sizes(self))
        object.__setattr__(self, "ops", list(_ops(self.module)))

    def returned(self) -> list[Any]:
        """Outputs of the program: fake tensors, and the numbers that it computes."""
        return [r.meta["val"] for r, is_made in zip(self.results, self.made) if is_made]

    def values(self, numbers: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
        """Values of the open sizes in a call with these size inputs and tensor shapes."""
        return self.symbols.values(numbers, shapes)

    def holds(self, values: Sequence[int]) -> bool:
        """Return whether the graph takes such values."""
        return self.symbols.hold(self.symbols.sizes(values))

    def numbers(self, values: Sequence[int]) -> list[int]:
        """The size inputs of a call with these values."""
        return list(self.symbols.sizes(values).all(self.counts))

    def inner_sizes(self, values: Sequence[int]) -> list[int]:
        """Sizes of tensors inside of it that are no sum or product of others."""
        return list(self.inner.values(tuple(values)))

    def operands(self, values: Sequence[int]) -> list[tuple[Shape, Shape]]:
        """Shape and strides of each tensor input."""
        sizes = self.symbols.sizes(values)
        return [(sizes.all(x.shape), sizes.all(x.stride())) for x in self.given]

    def shapes(self, values: Sequence[int]) -> list[Shape]:
        """Shape of each result."""
        sizes = self.symbols.sizes(values)
        return [_shape(r, sizes) for r in self.returned()]


def _ops(module: GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op == "call_function":
            yield str(node.target)
            for inner in subgraphs(node):
                yield from _ops(inner)


def _shape(result: Any, sizes: Sizes) -> Shape:
    return sizes.all(result.shape) if isinstance(result, torch.Tensor) else ()


def _open_sizes(graph: Graph) -> list[DynamicSize]:
    found = []
    for size in graph.symbols.open:
        results = [
            Dim(i, d)
            for i, made in enumerate(graph.returned())
            for d, n in enumerate(made.shape if isinstance(made, torch.Tensor) else ())
            if isinstance(n, torch.SymInt) and n.node.expr == size.expression
        ]
        operands = tuple(Dim(*d) for d in size.dims)
        found.append(
            DynamicSize(size.origin, size.low, size.high, size.varies, operands, tuple(results))
        )
    return found

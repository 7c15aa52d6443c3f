"""Write the small StableHLO programs of collectives as text.

Text is 30 times cheaper to make than a trace of JAX. A program is for one group of devices, each of
which is a replica, numbered as the ranks of the group are; or for several groups at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ELEMENTS: dict[torch.dtype, str] = {
    torch.bool: "i1",
    torch.uint8: "ui8",
    torch.uint16: "ui16",
    torch.uint32: "ui32",
    torch.uint64: "ui64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
}
DTYPES: dict[str, torch.dtype] = {element: dtype for dtype, element in ELEMENTS.items()}

Shape = tuple[int, ...]


def element_of(dtype: torch.dtype) -> str:
    """StableHLO's name of a dtype.

    Raises:
        TypeError: It has none.
    """
    try:
        return ELEMENTS[dtype]
    except KeyError:
        raise TypeError(f"{dtype} is not supported in collectives on device 'tpu'.") from None


@dataclass(frozen=True)
class Value:
    """A value of a program: its name, shape and element type."""

    name: str
    shape: Shape
    element: str

    @property
    def type(self) -> str:
        """The type as StableHLO writes it: ``tensor<2x3xf32>``."""
        return f"tensor<{''.join(f'{n}x' for n in self.shape)}{self.element}>"


class ProgramWriter:
    """A program under construction.

    Args:
        size: Number of replicas that take part in each collective.
        groups: Groups of each collective, in order, if there are more replicas. What is said of
            "all replicas" below, and of one by its number, is then of those in the same group.
        scatters: Whether a reduce-scatter is an op of its own; else each replica reduces the rows
            that all others sent it.

    Example:
        >>> p = ProgramWriter(2)
        >>> x = p.parameter((4,), "f32")
        >>> text = p.text([p.all_reduce(x, "add")])
    """

    def __init__(
        self, size: int, groups: Sequence[Sequence[int]] | None = None, scatters: bool = True
    ) -> None:
        self.size = size
        self.scatters = scatters
        self._groups = [list(group) for group in groups or [range(size)]]
        self._parameters: list[Value] = []
        self._lines: list[str] = []

    def parameter(self, shape: Shape, element: str) -> Value:
        """A new parameter."""
        value = Value(f"%arg{len(self._parameters)}", shape, element)
        self._parameters.append(value)
        return value

    def text(self, results: list[Value], takes: bool = False) -> str:
        """The program as text.

        Args:
            results: Its results.
            takes: Whether each result takes the memory of the parameter of its number.
        """
        parameters = ", ".join(
            f"{p.name}: {p.type}" + (f" {{tf.aliasing_output = {i} : i32}}" if takes else "")
            for i, p in enumerate(self._parameters)
        )
        types = ", ".join(r.type for r in results)
        body = "\n    ".join(self._lines)
        names = ", ".join(r.name for r in results)
        return (
            f"module @collective {{\n  func.func public @main({parameters}) -> ({types}) {{\n"
            f"    {body}\n    return {names} : {types}\n  }}\n}}\n"
        )

    def _add(self, text: str, shape: Shape, element: str) -> Value:
        value = Value(f"%{len(self._lines)}", shape, element)
        self._lines.append(f"{value.name} = {text}")
        return value

    def _op(
        self, name: str, operands: list[Value], shape: Shape, element: str, attributes: str = ""
    ) -> Value:
        result = Value("", shape, element)
        names = ", ".join(v.name for v in operands)
        types = ", ".join(v.type for v in operands)
        text = f'"stablehlo.{name}"({names}) {attributes} : ({types}) -> {result.type}'
        return self._add(text, shape, element)

    @property
    def _group(self) -> str:
        count = len(self._groups)
        return f"replica_groups = dense<{self._groups}> : tensor<{count}x{self.size}xi64>"

    def _position(self) -> Value:
        """Number of the replica in its group."""
        own = self._add("stablehlo.replica_id : tensor<ui32>", (), "ui32")
        if len(self._groups) == 1:
            return own
        places = {rank: i for group in self._groups for i, rank in enumerate(group)}
        table = self.constant_row([places[rank] for rank in range(len(places))], "ui32")
        found = self._op(
            "dynamic_slice", [table, own], (1,), "ui32", "{slice_sizes = array<i64: 1>}"
        )
        return self.reshape(found, ())

    def _reducer(self, op: str, element: str) -> str:
        scalar = f"tensor<{element}>"
        return (
            f"({{ ^bb0(%a: {scalar}, %b: {scalar}): "
            f'%c = "stablehlo.{op}"(%a, %b) : ({scalar}, {scalar}) -> {scalar} '
            f'"stablehlo.return"(%c) : ({scalar}) -> () }})'
        )

    def constant(self, number: str, element: str) -> Value:
        """A scalar, as StableHLO writes it: ``"1.0"``, ``"true"``."""
        return self._add(f"stablehlo.constant dense<{number}> : tensor<{element}>", (), element)

    def constant_row(self, numbers: list[int], element: str) -> Value:
        """Numbers in one dim."""
        row = Value("", (len(numbers),), element)
        return self._add(f"stablehlo.constant dense<{numbers}> : {row.type}", row.shape, element)

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Other dims for the same elements."""
        return x if x.shape == shape else self._op("reshape", [x], shape, x.element)

    def convert(self, x: Value, element: str) -> Value:
        """Another element type for the same numbers."""
        return x if x.element == element else self._op("convert", [x], x.shape, element)

    def bitcast(self, x: Value, element: str) -> Value:
        """Another element type of the same width for the same bits."""
        return x if x.element == element else self._op("bitcast_convert", [x], x.shape, element)

    def broadcast(self, x: Value, shape: Shape) -> Value:
        """A scalar everywhere."""
        return self._op(
            "broadcast_in_dim", [x], shape, x.element, "{broadcast_dimensions = array<i64>}"
        )

    def binary(self, op: str, x: Value, y: Value) -> Value:
        """An elementwise op of StableHLO."""
        return self._op(op, [x, y], x.shape, x.element)

    def only_from(self, x: Value, rank: int) -> Value:
        """``x`` on one replica, zeros on the others."""
        own = self._position()
        wanted = self.constant(str(rank), "ui32")
        direction = "{comparison_direction = #stablehlo<comparison_direction EQ>}"
        here = self._op("compare", [own, wanted], (), "i1", direction)
        zero = "false" if x.element == "i1" else "0"
        zeros = self.broadcast(self.constant(zero, x.element), x.shape)
        return self._op("select", [here, x, zeros], x.shape, x.element)

    def row(self, x: Value, index: int) -> Value:
        """``x[index]``."""
        return self.reshape(self.rows(x, index, index + 1), x.shape[1:])

    def rows(self, x: Value, start: int, end: int) -> Value:
        """``x[start:end]``."""
        if (start, end) == (0, x.shape[0]):
            return x
        rest = x.shape[1:]
        attributes = (
            f"{{start_indices = array<i64: {_list((start, *(0 for _ in rest)))}>, "
            f"limit_indices = array<i64: {_list((end, *rest))}>, "
            f"strides = array<i64: {_list((1,) * len(x.shape))}>}}"
        )
        return self._op("slice", [x], (end - start, *rest), x.element, attributes)

    def stack(self, values: list[Value]) -> Value:
        """Values of one shape along a new first dim."""
        rows = [self.reshape(v, (1, *v.shape)) for v in values]
        if len(rows) == 1:
            return rows[0]
        shape = (len(rows), *values[0].shape)
        return self._op("concatenate", rows, shape, values[0].element, "{dimension = 0 : i64}")

    def all_reduce(self, x: Value, op: str) -> Value:
        """The reduction over all replicas, by an elementwise op of StableHLO."""
        text = (
            f'"stablehlo.all_reduce"({x.name}) {self._reducer(op, x.element)} '
            f"{{{self._group}}} : ({x.type}) -> {x.type}"
        )
        return self._add(text, x.shape, x.element)

    def all_gather(self, x: Value) -> Value:
        """The values of all replicas along a new first dim."""
        row = self.reshape(x, (1, *x.shape))
        attributes = f"{{all_gather_dim = 0 : i64, {self._group}}}"
        return self._op("all_gather", [row], (self.size, *x.shape), x.element, attributes)

    def reduce_scatter(self, x: Value, op: str) -> Value:
        """Of the reduction over all replicas of ``x``, row ``i`` on replica ``i``."""
        result = Value("", (1, *x.shape[1:]), x.element)
        text = (
            f'"stablehlo.reduce_scatter"({x.name}) {self._reducer(op, x.element)} '
            f"{{scatter_dimension = 0 : i64, {self._group}}} : ({x.type}) -> {result.type}"
        )
        return self.reshape(self._add(text, result.shape, x.element), x.shape[1:])

    def all_to_all(self, x: Value) -> Value:
        """Row ``i`` of replica ``j`` becomes row ``j`` of replica ``i``."""
        attributes = (
            "{split_dimension = 0 : i64, concat_dimension = 0 : i64, "
            f"split_count = {self.size} : i64, {self._group}}}"
        )
        return self._op("all_to_all", [x], x.shape, x.element, attributes)

    def permute(self, x: Value, to: Sequence[int]) -> Value:
        """The value of replica ``i`` on replica ``to[i]``, for all of them."""
        pairs = [[group[i], group[j]] for group in self._groups for i, j in enumerate(to)]
        attributes = f"{{source_target_pairs = dense<{pairs}> : tensor<{len(pairs)}x2xi64>}}"
        return self._op("collective_permute", [x], x.shape, x.element, attributes)

    def reduce_rows(self, x: Value, op: str) -> Value:
        """The reduction over the first dim, in order."""
        result = self.row(x, 0)
        for i in range(1, x.shape[0]):
            result = self.binary(op, result, self.row(x, i))
        return result


def numel(shape: Shape) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))

"""Read XLA's optimized HLO text: shapes, collectives, loops, and how often each runs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tpu_core.extend import KernelCost

_BITS = {
    **{"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16},
    **{"s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64},
    **{"c64": 64, "c128": 128, "f4e2m1fn": 4, "f8e8m0fnu": 8, "token": 0},
}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """An array of a program.

    Attributes:
        dtype: ``"bf16"``.
        dims: Its size.
        minor_to_major: Order of the dimensions in memory.
        tile: Sizes that the minor dimensions are padded to multiples of.
        space: Memory it is in: 0 is HBM, others are on the chip.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        return _BITS.get(self.dtype, 8)  # the float8 kinds are many

    @property
    def bytes(self) -> int:
        """Without padding."""
        return self.elements * self.bits // 8

    @property
    def padded_bytes(self) -> int:
        """Size in memory: the minor dimensions fill whole tiles."""
        dims = list(self.dims)
        for place, size in zip(self.minor_to_major, reversed(self.tile)):
            dims[place] = math.ceil(dims[place] / size) * size
        return math.prod(dims) * self.bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """The scopes that it was lowered in, without those of jax."""
        found = _OP_NAME.search(self.rest)
        scopes = KernelCost.without(found[1]) if found else ""
        return re.sub(r"jit\(\w*\)/|while/|body/|closed_call/", "", scopes)

    @property
    def module(self) -> str:
        """The scope alone, without op and primitive."""
        return self.op_name.rpartition("/")[0].rpartition("/")[0] or self.op_name

    def computation(self, role: str) -> str | None:
        """Name of a computation it calls: ``calls``, ``body``, ``condition``."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def hbm_bytes(self) -> int:
        """Of its results, padding included."""
        return sum(s.padded_bytes for s in self.shapes if s.space == 0)


@dataclass
class Module:
    """A parsed program.

    Attributes:
        entry: Name of the computation that runs first.
        computations: Instructions of each, in the order they run.
    """

    entry: str
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    _users: dict[str, dict[str, list[Instruction]]] = field(default_factory=dict, repr=False)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of runs of each computation that is not part of a fusion."""
        counts: dict[str, int] = defaultdict(int)

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for instruction in self.computations.get(name, ()):
                for callee, factor in self._callees(instruction):
                    visit(callee, times * factor)

        visit(self.entry, 1)
        return dict(counts)

    def _callees(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        if instruction.opcode == "while":
            body, condition = instruction.computation("body"), instruction.computation("condition")
            if body and condition:
                yield body, self.trip_count(condition)
        elif instruction.opcode in ("call", "call-start", "async-start"):
            callee = instruction.computation("to_apply") or instruction.computation("calls")
            if callee:
                yield callee, 1
        elif instruction.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
            for name in _OPERAND.findall(branches[1]) if branches else ():
                yield name, 1

    def trip_count(self, condition: str) -> int:
        """Trip count of a loop that counts up from 0: the constant it compares with, else 1."""
        lines = {i.name: i for i in self.computations.get(condition, ())}
        constants = [
            int(value[1])
            for i in lines.values()
            if i.opcode == "constant" and (value := re.match(r"(-?\d+)\)", i.rest))
        ]
        return max([1, *constants])

    def running(self) -> Iterator[tuple[Instruction, int]]:
        """Each instruction outside fusions, and how often it runs."""
        for name, times in self.counts.items():
            for instruction in self.computations.get(name, ()):
                yield instruction, times

    @cached_property
    def tables(self) -> dict[str, dict[str, Instruction]]:
        """Instructions of each computation by name."""
        return {name: {i.name: i for i in lines} for name, lines in self.computations.items()}

    @cached_property
    def home(self) -> dict[str, str]:
        """Computation of each instruction; names are unique in a program."""
        return {i.name: name for name, lines in self.computations.items() for i in lines}

    def users(self, computation: str) -> dict[str, list[Instruction]]:
        """The instructions of a computation that use each value of it."""
        if computation not in self._users:
            found: dict[str, list[Instruction]] = defaultdict(list)
            for instruction in self.computations.get(computation, ()):
                for operand in instruction.operands:
                    found[operand].append(instruction)
            self._users[computation] = dict(found)
        return self._users[computation]

    @property
    def entry_instructions(self) -> list[Instruction]:
        return self.computations.get(self.entry, [])


def parse(text: str) -> Module:
    """Parse the text of an HLO module."""
    module = Module("")
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = module.computations.setdefault(header[2], [])
                if header[1]:
                    module.entry = header[2]
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            if instruction:
                current.append(instruction)
    return module


def _instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    end = _type_end(line, start.end())
    opcode, _, rest = line[end + 1 :].partition("(")
    operands = rest[: _closing(rest)]
    return Instruction(
        start[2],
        opcode.strip(),
        tuple(_shapes(line[start.end() : end])),
        tuple(_OPERAND.findall(operands)),
        rest,
        bool(start[1]),
    )


def _type_end(line: str, begin: int) -> int:
    """End of a type: the first space outside brackets."""
    depth = 0
    for place in range(begin, len(line)):
        c = line[place]
        if c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
        elif c == " " and depth == 0:
            return place
    return len(line)


def _closing(rest: str) -> int:
    """Position after the last operand."""
    depth = 1
    for place, c in enumerate(rest):
        if c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
            if depth == 0:
                return place
    return len(rest)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        size = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        order, _, attributes = layout.partition(":")
        tile = _TILE.search(attributes)
        space = re.search(r"S\((\d+)\)", attributes)
        yield Shape(
            dtype,
            size,
            tuple(int(n) for n in order.split(",") if n),
            tuple(int(n) for n in tile[1].split(",")) if tile else (),
            int(space[1]) if space else 0,
        )

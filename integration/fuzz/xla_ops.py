"""What an op of the fuzzer ``xla`` is, and the draws of operands that many ops share.

An op is an expression of Python over its operands ``a``, ``b``, ``c`` and its parameters. Its kind
says what of its result is known beforehand:

* ``moves``: the result's values are among the operands'.
* ``sums``: sums and products, exact on integers while no partial result needs more digits than the
  type has; in integer types always, modulo a power of two.
* ``smooth``: rounded; a small change of an operand makes a small change of the result.
* ``steps``: a rounding of an operand may change the result by a lot, so that operands must be equal
  bit by bit on both sides; then the result is.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Accept = Callable[[Tensor], bool]
Drawn = tuple[list[int], dict[str, Any]] | None

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
MOST_ELEMENTS = 1 << 21
OPERANDS = "abcde"


class Pool(Protocol):
    """The values a program has so far, while it is drawn."""

    r: random.Random

    def pick(self, accept: Accept = ...) -> int | None: ...

    def value(self, i: int) -> Tensor: ...

    def new(self, shape: list[int], dtype: torch.dtype, lo: int = -4, hi: int = 4) -> int: ...


Draw = Callable[[Pool], Drawn]


@dataclass(frozen=True)
class Op:
    """An op of a program.

    Attributes:
        code: Python; ``a`` is the first operand. Parameters go by name.
        kind: See above.
        draw: Operands and parameters.
        bound: Like ``code``, on absolute values: not below any partial result.
        raw: Positions of operands that are indices or masks, not numbers.
        most: Largest absolute value that it is drawn for.
    """

    code: str
    kind: str
    draw: Draw
    bound: str
    raw: frozenset[int] = frozenset()
    most: float = float("inf")

    def function(self, names: list[str], bound: bool = False) -> Callable[..., Any]:
        code = self.bound if bound else self.code
        made: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {code}", SCOPE)
        return made

    def text(self, operands: list[str], params: dict[str, Any]) -> str:
        """The expression for some operands."""
        known = dict(zip(OPERANDS, operands)) | {k: repr(v) for k, v in params.items()}
        return ast.unparse(_Names(known).visit(ast.parse(self.code, mode="eval")))


class _Names(ast.NodeTransformer):
    def __init__(self, known: dict[str, str]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802 (ast's name)
        return ast.parse(self.known.get(node.id, node.id), mode="eval").body


SCOPE = {"torch": torch, "F": F}
OPS: dict[str, Op] = {}


def op(
    name: str, kind: str, code: str, draw: Draw, bound: str = "", raw: str = "", **more: Any
) -> None:
    positions = frozenset(map(OPERANDS.index, raw))
    OPS[name] = Op(code, kind, draw, bound or code, positions, **more)


def run(name: str, operands: list[Tensor], params: dict[str, Any], bound: bool = False) -> Tensor:
    names = [*OPERANDS[: len(operands)], *params]
    result: Tensor = OPS[name].function(names, bound)(*operands, *params.values())
    return result


# --- what an operand may be -----------------------------------------------------------------------


def anything(x: Tensor) -> bool:
    return True


def number(x: Tensor) -> bool:
    return x.dtype != torch.bool


def floating(x: Tensor) -> bool:
    return x.is_floating_point()


def inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def real(x: Tensor) -> bool:
    return number(x) and not x.is_complex()


def integral(x: Tensor) -> bool:
    return not inexact(x)


def integer(x: Tensor) -> bool:
    return integral(x) and number(x)


def shaped(accept: Accept, least: int = 1, most: int = 8) -> Accept:
    """Accepted, with so many dims, none of them empty."""
    return lambda x: least <= x.dim() <= most and accept(x) and x.numel() > 0


# --- draws ----------------------------------------------------------------------------------------


def one(accept: Accept = number, **params: Callable[[random.Random, Tensor], Any]) -> Draw:
    """An operand that is accepted, and parameters drawn for it."""

    def draw(p: Pool) -> Drawn:
        i = p.pick(accept)
        if i is None:
            return None
        return [i], {k: f(p.r, p.value(i)) for k, f in params.items()}

    return draw


def operand(p: Pool, i: int, accept: Accept = number) -> int:
    """A second operand that broadcasts with a first: one of the pool's, or a new one."""
    x = p.value(i)

    def fits(y: Tensor) -> bool:
        try:
            return accept(y) and torch.broadcast_shapes(x.shape, y.shape).numel() <= MOST_ELEMENTS
        except RuntimeError:
            return False

    if p.r.random() < 0.6 and (j := p.pick(fits)) is not None:
        return j
    shape = [1 if p.r.random() < 0.3 else n for n in x.shape]
    if p.r.random() < 0.3:
        shape = shape[p.r.randint(0, len(shape)) :]
    return p.new(shape, x.dtype)


def two(accept: Accept = number, **params: Callable[[random.Random], Any]) -> Draw:
    def draw(p: Pool) -> Drawn:
        i = p.pick(accept)
        if i is None:
            return None
        j = operand(p, i, accept)
        ins = [i, j] if p.r.random() < 0.5 else [j, i]
        return ins, {k: f(p.r) for k, f in params.items()}

    return draw


def masked(p: Pool) -> Drawn:
    """A mask and two operands, all of which broadcast."""
    i = p.pick(number)
    if i is None:
        return None
    j = operand(p, i)
    shape = torch.broadcast_shapes(p.value(i).shape, p.value(j).shape)
    if (m := p.pick(lambda m: m.dtype == torch.bool and m.shape == shape)) is None:
        m = p.new([n if p.r.random() < 0.8 else 1 for n in shape], torch.bool)
    return [m, i, j], {}


def a_dim(r: random.Random, x: Tensor) -> int:
    return r.randrange(-x.dim(), x.dim())


def some_dims(r: random.Random, x: Tensor) -> list[int]:
    return sorted(r.sample(range(x.dim()), r.randint(1, x.dim())))


def flag(r: random.Random, x: Tensor) -> bool:
    return r.random() < 0.5


def choice(*values: Any) -> Callable[..., Any]:
    return lambda r, *_: r.choice(values)

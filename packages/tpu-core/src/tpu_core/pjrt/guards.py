"""Guards against algebra of XLA that is not that of machine numbers.

XLA takes the square and the absolute value of an integer for non-negative, though both wrap. It
folds pairs of functions as if nothing overflowed between them: ``log(exp(x))`` becomes ``x``,
``sqrt(x * x)`` becomes ``abs(x)``. It multiplies by the reciprocal of a number, or of what is
broadcast, in place of dividing by it, so that ``x / 41`` is not 1 where ``x`` is 41. A product with
a boolean that became a float is a choice to it, so that NaN times False is 0.

Here integers are multiplied as unsigned ones, a boolean becomes a float by a choice between 1 and
0, and the bits of a float that XLA must not look through are combined with others twice. LLVM,
which folds nothing of floats, takes that away again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

# Functions whose result must not be folded into the one that takes it: (taker, operand): makers.
_FOLDED = {
    ("stablehlo.log", 0): {"exponential", "power"},
    ("stablehlo.sqrt", 0): {"multiply", "power"},
    ("stablehlo.rsqrt", 0): {"multiply", "power", "divide"},
    ("stablehlo.power", 0): {"exponential", "power", "sqrt"},
    ("stablehlo.multiply", 0): {"exponential"},
    ("stablehlo.divide", 0): {"divide"},
    ("stablehlo.divide", 1): {
        "divide",
        "exponential",
        "power",
        "sqrt",
        "constant",
        "broadcast_in_dim",
    },
}


def walk(module: ir.Module, change: Callable[[Any], None]) -> None:
    """Call ``change`` with every operation that the module has when the walk begins."""
    found = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        for op in found:
            change(op)


def guard(module: ir.Module, widest: int, *, rounds_quotients: bool = True) -> None:
    """Keep XLA from folding what machine numbers do not allow, in place.

    Args:
        module: StableHLO.
        widest: Bits of the widest floats whose bits the platform can take.
        rounds_quotients: Whether the platform rounds quotients of float32 to the nearest.
    """
    walk(module, functools.partial(_guard, widest=widest))
    if not rounds_quotients:
        walk(module, _divide_in_float64)


def _guard(op: Any, widest: int) -> None:
    if op.name == "stablehlo.multiply" and _is_signed(op.results[0].type):
        _multiply_bits(op)
    elif op.name == "stablehlo.abs" and _is_signed(op.results[0].type):
        _abs_by_bits(op)
    elif op.name == "stablehlo.convert" and _is_boolean(op.operands[0].type):
        _convert_by_choice(op)
    else:
        for i, operand in enumerate(op.operands):
            makers = _FOLDED.get((op.name, i))
            element = _element(operand.type)
            if element is None or element.width > widest or makers is None:
                continue
            if _is_made_by(operand, makers):
                with ir.InsertionPoint(op), op.location:
                    op.operands[i] = _hidden(operand, _mask(op, i))


def _mask(op: Any, i: int) -> Any:
    """A value of the type of an operand that it is not: XLA cancels what meets itself."""
    others = [x for x in op.operands if x != op.operands[i]]
    return others[0] if others else op.operands[i].owner.operands[0]


def _is_made_by(value: Any, makers: set[str]) -> bool:
    maker = value.owner
    if not isinstance(maker, ir.Operation | ir.OpView):  # an argument
        return False
    if maker.operation.name == "stablehlo.broadcast_in_dim":
        source = ir.RankedTensorType(maker.operation.operands[0].type)
        is_smaller = math.prod(source.shape) < math.prod(ir.RankedTensorType(value.type).shape)
        return "broadcast_in_dim" in makers and is_smaller
    return maker.operation.name.removeprefix("stablehlo.") in makers


def _element(kind: ir.Type) -> ir.FloatType | None:
    """The element type of a tensor of floats."""
    if not isinstance(kind, ir.RankedTensorType):
        return None
    element = kind.element_type
    return element if isinstance(element, ir.FloatType) else None


def _is_boolean(kind: ir.Type) -> bool:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return False
    element = kind.element_type
    return isinstance(element, ir.IntegerType) and element.width == 1


def _is_signed(kind: ir.Type) -> bool:
    if not isinstance(kind, ir.RankedTensorType):
        return False
    element = kind.element_type
    return isinstance(element, ir.IntegerType) and element.is_signless and element.width > 1


def _hidden(value: Any, other: Any) -> Any:
    kind = ir.RankedTensorType(value.type)
    integer = ir.IntegerType.get_signless(ir.FloatType(kind.element_type).width)
    bits = ir.RankedTensorType.get(kind.shape, integer)
    # Of another operand, so that a divisor is no longer a number that is broadcast.
    mask = hlo.bitcast_convert(bits, other)
    flipped = hlo.xor(hlo.xor(hlo.bitcast_convert(bits, value), mask), mask)
    return hlo.bitcast_convert(kind, flipped)


def _divide_in_float64(op: Any) -> None:
    """Divide float32 by a reciprocal of float64, which rounds to the quotient.

    No quotient of float32 is so near the middle of two others that the error of float64 decides.
    LLVM would make a division of float64 one of float32 again.
    """
    kind = op.results[0].type if op.name == "stablehlo.divide" else None
    if kind is None or not isinstance(_element(kind), ir.F32Type):
        return
    with ir.InsertionPoint(op), op.location:
        wide = ir.RankedTensorType.get(ir.RankedTensorType(kind).shape, ir.F64Type.get())
        x, y = (hlo.convert(wide, operand) for operand in op.operands)
        one = ir.DenseElementsAttr.get_splat(wide, ir.FloatAttr.get(wide.element_type, 1.0))
        reciprocal = hlo.divide(hlo.constant(one), y)
        quotient = hlo.convert(kind, hlo.multiply(x, reciprocal))
    op.results[0].replace_all_uses_with(quotient)
    op.erase()


def _multiply_bits(op: Any) -> None:
    kind = ir.RankedTensorType(op.results[0].type)
    with ir.InsertionPoint(op), op.location:
        unsigned = ir.IntegerType.get_unsigned(ir.IntegerType(kind.element_type).width)
        bits = ir.RankedTensorType.get(kind.shape, unsigned)
        x, y = (hlo.convert(bits, x) for x in op.operands)
        product = hlo.convert(kind, hlo.multiply(x, y))
    op.results[0].replace_all_uses_with(product)
    op.erase()


def _abs_by_bits(op: Any) -> None:
    kind = ir.RankedTensorType(op.results[0].type)
    with ir.InsertionPoint(op), op.location:
        (x,) = op.operands
        last = ir.IntegerAttr.get(kind.element_type, ir.IntegerType(kind.element_type).width - 1)
        bits = hlo.constant(ir.DenseElementsAttr.get_splat(kind, last))
        sign = hlo.shift_right_arithmetic(x, bits)
        size = hlo.subtract(hlo.xor(x, sign), sign)
    op.results[0].replace_all_uses_with(size)
    op.erase()


def _convert_by_choice(op: Any) -> None:
    kind = ir.RankedTensorType(op.results[0].type)
    element = kind.element_type
    is_complex = isinstance(element, ir.ComplexType)
    part = ir.ComplexType(element).element_type if is_complex else element
    if not isinstance(part, ir.FloatType):
        return
    with ir.InsertionPoint(op), op.location:
        parts = ir.RankedTensorType.get(kind.shape, part)
        one, zero = (
            hlo.constant(ir.DenseElementsAttr.get_splat(parts, ir.FloatAttr.get(part, x)))
            for x in (1.0, 0.0)
        )
        result = hlo.select(op.operands[0], one, zero)
        if is_complex:
            result = hlo.complex(result, zero)
    op.results[0].replace_all_uses_with(result)
    op.erase()

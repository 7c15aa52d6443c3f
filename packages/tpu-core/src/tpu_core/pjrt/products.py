"""Products as XLA:CPU computes them well: operands as they lie in memory, of 32 bits or more.

XLA:CPU folds the transpose of an operand into a product only where it calls a library, never into
the product of a matrix and a vector: each token of a decoder would move every weight first, at up
to ten times the cost of the product itself.
"""

from __future__ import annotations

import math
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

from tpu_core.pjrt.guards import walk


def fold_transposes(module: ir.Module) -> None:
    """Let products with a vector contract a transposed operand's own dims, in place.

    Args:
        module: StableHLO. A product qualifies where one side has a single row: all its dims but
            the contracted and batch ones have one element.
    """
    walk(module, _fold)


def widen_operands(module: ir.Module) -> None:
    """Give products and convolutions float32 in place of 16- and 8-bit floats, in place.

    XLA:CPU decides early which products of such operands a library computes, and may transpose an
    operand afterwards: then none does, and the program fails when it runs. Widened operands are
    exact, and as fast.
    """
    walk(module, _widen)


def _is_narrow_float(kind: ir.Type) -> bool:
    return isinstance(kind, ir.FloatType) and kind.width < 32


def _widen(product: Any) -> None:
    if product.name not in ("stablehlo.dot_general", "stablehlo.convolution"):
        return
    types = [ir.RankedTensorType(x.type) for x in (*product.operands, *product.results)]
    if not any(_is_narrow_float(t.element_type) for t in types):
        return
    if not all(isinstance(t.element_type, ir.FloatType) for t in types):
        return
    if "algorithm" in product.attributes:  # asked for by name
        return
    wide = ir.F32Type.get()
    with ir.InsertionPoint(product), product.location:
        for i, t in enumerate(types[:2]):
            if _is_narrow_float(t.element_type):
                kind = ir.RankedTensorType.get(t.shape, wide)
                product.operands[i] = hlo.convert(kind, product.operands[i])
    (result,) = product.results
    if _is_narrow_float(types[2].element_type):
        uses = [(use.owner, use.operand_number) for use in result.uses]
        with ir.InsertionPoint.after(product), product.location:
            result.set_type(ir.RankedTensorType.get(types[2].shape, wide))
            narrow = hlo.convert(types[2], result)
        for owner, number in uses:
            owner.operands[number] = narrow


def _fold(op: Any) -> None:
    if op.name != "stablehlo.dot_general":
        return
    product = op.opview
    numbers = hlo.DotDimensionNumbers(product.dot_dimension_numbers)
    batch = [list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)]
    contracted = [
        list(numbers.lhs_contracting_dimensions),
        list(numbers.rhs_contracting_dimensions),
    ]
    operands = list(product.operands)
    shapes = [ir.ShapedType(operand.type).shape for operand in operands]
    free = [[d for d in range(len(shapes[i])) if d not in batch[i] + contracted[i]] for i in (0, 1)]
    if min(math.prod(shapes[i][d] for d in free[i]) for i in (0, 1)) != 1:
        return
    folded = False
    for i, operand in enumerate(operands):
        transpose = operand.owner
        if not isinstance(transpose, ir.Operation | ir.OpView):  # an argument
            continue
        if transpose.operation.name != "stablehlo.transpose":
            continue
        order = list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"]))
        moved = [order[d] for d in free[i]]
        if moved != sorted(moved):  # the result's dims would change places
            continue
        batch[i] = [order[d] for d in batch[i]]
        contracted[i] = [order[d] for d in contracted[i]]
        product.operation.operands[i] = transpose.operands[0]
        folded = True
    if folded:
        product.operation.attributes["dot_dimension_numbers"] = hlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=batch[0],
            rhs_batching_dimensions=batch[1],
            lhs_contracting_dimensions=contracted[0],
            rhs_contracting_dimensions=contracted[1],
        )

"""Matrix-vector products that read their matrix as it lies in memory.

XLA:CPU folds the transpose of an operand into a product only where it calls a library, never into
the product of a matrix and a vector: each token of a decoder would move every weight first, at up
to ten times the cost of the product itself.
"""

from __future__ import annotations

import math
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo


def fold_transposes(module: ir.Module) -> None:
    """Let products with a vector contract a transposed operand's own dims, in place.

    Args:
        module: StableHLO. A product qualifies where one side has a single row: all its dims but
            the contracted and batch ones have one element.
    """

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.dot_general":
            _fold(op.opview)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


def _fold(product: Any) -> None:
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

"""StableHLO text as a part of a JAX trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

_inlined = Primitive("inlined_stablehlo")
_inlined.multiple_results = True


def inlined(
    module: str,
    operands: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
) -> list[jax.Array]:
    """Call the function ``main`` of a module in a trace.

    Args:
        module: StableHLO text.
        operands: Of the function.
        results: Shape and dtype of each of its results.

    Example:
        >>> (y,) = inlined(text, [x], [((4,), np.dtype(np.float32))])
    """
    values: list[jax.Array] = _inlined.bind(*operands, module=module, results=tuple(results))
    return values


def _avals(*_: Any, results: Sequence[tuple[tuple[int, ...], Any]], **__: Any) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]


def _lower(ctx: Any, *operands: Any, module: str, **_: Any) -> Any:
    whole = ctx.module_context.module
    with whole.context:
        part = ir.Module.parse(module)
    main: Any = ir.SymbolTable(part.operation)["main"]
    types = list(main.type.results)
    name = mlir.merge_mlir_modules(whole, "collective", part)
    return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), operands).results


_inlined.def_abstract_eval(_avals)
mlir.register_lowering(_inlined, _lower)

"""Symbolic sizes of PyTorch as those of JAX and back, for shapes under ``dynamic=True``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax import export
from jax.extend.core import InconclusiveDimensionOperation

from tpu_kernels.tracing import complaint, narrow

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitXor: operator.pow,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


class Scope:
    """The sizes of some tensors; a symbolic one is a dimension variable of JAX.

    Sizes that PyTorch knows to be equal are one variable, and so are those that are computed from
    others: a shape then names what the function's result is made of, and nothing more.

    Attributes:
        shapes: For each tensor, its shape for JAX.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._names: dict[Any, str] = {}
        self._values: dict[str, Any] = {}
        texts = [[self._text(n) for n in t.shape] for t in tensors]
        scope = export.SymbolicScope()
        self.shapes = [
            export.symbolic_shape(f"({', '.join(s)},)" if s else "()", scope=scope) for s in texts
        ]

    def _text(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        expression = size.node.expr
        if expression not in self._names:
            from torch.fx.experimental.symbolic_shapes import statically_known_true

            # A guard may say that two products are equal, and leaves them as they are.
            equal = (n for n, s in self._values.items() if statically_known_true(s == size))
            name = next(equal, f"d{len(self._values)}")
            self._names[expression] = name
            self._values.setdefault(name, size)
        return self._names[expression]

    def torch_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """A shape of JAX with PyTorch's sizes in it."""
        return _with_sizes(shape, self._values)

    def holds(
        self, fn: Callable[..., list[Any]], avals: Sequence[Any], found: Sequence[Any], wide: bool
    ) -> bool:
        """Return whether symbolic results are those for some numbers in place of the symbols.

        JAX takes sizes that it cannot compare for different ones, so that a function that asks
        ``if x.shape[0] % 2 == 0`` has one answer for all.
        """
        known = {name: _hint(size) for name, size in self._values.items()}
        hints = {name: hint for name, hint in known.items() if hint is not None}
        if len(hints) < len(known):
            return False
        for more in (0, 1, 2):
            numbers = {name: hint + more for name, hint in hints.items()}
            concrete = [jax.ShapeDtypeStruct(_with_sizes(a.shape, numbers), a.dtype) for a in avals]
            with jax.enable_x64(wide):
                try:
                    out = jax.eval_shape(fn, *(narrow(a, wide) for a in concrete))
                except Exception:  # numbers that the function refuses, but for the actual ones
                    if not more:
                        return False
                    continue
            if [o.shape for o in out] != [_with_sizes(f.shape, numbers) for f in found]:
                return False
        return True


def _hint(size: torch.SymInt) -> int | None:
    """The size that PyTorch traces with; None for one that follows from data."""
    return size.node.hint if size.node.has_hint() else None


def _with_sizes(shape: Sequence[Any], sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(n if isinstance(n, int) else _size(str(n), sizes) for n in shape)


def _size(text: str, sizes: Mapping[str, Any]) -> Any:
    """Value of an expression of JAX's dimension variables."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return _CALLS[node.func.id](*map(value, node.args))
        return sizes[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    return value(ast.parse(text, mode="eval").body)


def evaluate(
    name: str, fn: Callable[..., list[Any]], avals: Sequence[Any], wide: bool
) -> list[Any] | None:
    """Shapes and dtypes of the results, or None where the function has to know a size."""
    with jax.enable_x64(wide):
        try:
            return list(jax.eval_shape(fn, *(narrow(a, wide) for a in avals)))
        except (InconclusiveDimensionOperation, jax.errors.ConcretizationTypeError):
            return None
        except Exception as error:
            raise complaint(name, avals, error) from error

"""Comparisons, predicates, logical and bitwise ops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_core.dtypes import cast, promote
from tpu_core.lowering.registry import lowering, register_table

Array = jax.Array


def promoted(fn: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
    """A binary lowering over operands promoted to a common dtype."""
    return lambda self, other: fn(*promote(self, other))


def _logical(fn: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
    return lambda self, other: fn(cast(self, np.bool_), cast(other, np.bool_))


def _on_floats(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A predicate that no integer satisfies."""

    def predicate(self: Array) -> Array:
        return jnp.zeros(self.shape, bool) if self.dtype.kind in "biu" else fn(self)

    return predicate


def _left_shift(x: Array, bits: Array) -> Array:
    width = x.dtype.itemsize * 8
    inside = (bits >= 0) & (bits < width)
    return jnp.where(inside, x << jnp.where(inside, bits, 0), jnp.zeros((), x.dtype))


def _right_shift(x: Array, bits: Array) -> Array:
    # aten/src/ATen/native/cpu/BinaryOpsKernel.cpp: out of range shifts leave the sign.
    last = x.dtype.itemsize * 8 - 1
    if x.dtype.kind == "u":
        shifted = x >> jnp.minimum(bits, last)
        return jnp.where(bits > last, jnp.zeros((), x.dtype), shifted)
    return x >> jnp.where((bits < 0) | (bits > last), jnp.full((), last, bits.dtype), bits)


def _on_bits(fn: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """``fn`` on the bits of integers, as unsigned numbers.

    XLA:CPU of jaxlib 0.10 crashes where both operands of a signed ``and`` or ``or`` were narrowed
    (``x.int() & y.int()`` of int64 tensors).
    """

    def on_bits(x: Array, y: Array) -> Array:
        if x.dtype.kind != "i":
            return fn(x, y)
        unsigned = np.dtype(f"u{x.dtype.name}")
        bits = (lax.bitcast_convert_type(a, unsigned) for a in (x, y))
        return lax.bitcast_convert_type(fn(*bits), x.dtype)

    return on_bits


def _rows(name: str, overloads: str, fn: Callable[..., Array]) -> dict[str, Callable[..., Array]]:
    return {f"aten.{name}.{overload}": fn for overload in overloads.split()}


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    register_table(_rows(_name, "Tensor Scalar", promoted(getattr(operator, _name))))
for _name, _fn in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    register_table(
        _rows(f"bitwise_{_name}", "Tensor Scalar Scalar_Tensor", promoted(_on_bits(_fn)))
    )
    register_table(_rows(f"logical_{_name}", "default", _logical(_fn)))
for _name, _fn in {"left": _left_shift, "right": _right_shift}.items():
    _shift = promoted(_fn)
    register_table(_rows(f"bitwise_{_name}_shift", "Tensor Tensor_Scalar Scalar_Tensor", _shift))
    register_table(_rows(f"__{_name[0]}shift__", "Tensor Scalar", _shift))

register_table(
    {
        "aten.bitwise_not.default": lambda self: ~self,
        "aten.logical_not.default": lambda self: ~cast(self, np.bool_),
        "aten.isnan.default": _on_floats(jnp.isnan),
        "aten.isinf.default": _on_floats(jnp.isinf),
        "aten.isposinf.default": _on_floats(jnp.isposinf),
        "aten.isneginf.default": _on_floats(jnp.isneginf),
        "aten.signbit.default": lambda self: (
            jnp.signbit(self) if self.dtype.kind not in "biu" else self < 0
        ),
    }
)


@lowering("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", "aten.isin.Scalar_Tensor")
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Array:
    """Membership by comparing all pairs, which XLA fuses into the reduction."""
    elements, tests = promote(elements, test_elements)
    found = jnp.any(elements[..., None] == jnp.ravel(tests), axis=-1)
    return ~found if invert else found

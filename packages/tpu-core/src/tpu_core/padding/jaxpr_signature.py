"""Signature of a jaxpr: a digest of its form, and the numbers in it with their dtypes.

Two traces of an op at different sizes have one form and different numbers, or are different
programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Digest of the form, the dtype of each number ("int" for a parameter), and the numbers.
Signature = tuple[str, tuple[str, ...], tuple[float, ...]]


def signature(traced: ClosedJaxpr, tables: Sequence[Any] = ()) -> Signature:
    """The signature of a trace, without the numbers that rules work out from result sizes.

    Args:
        traced: The trace.
        tables: Shapes and dtypes of its last inputs, which follow from no operand's.

    Example:
        >>> signature(jax.make_jaxpr(lambda x: x * 2)(jnp.zeros(3)))
        ('0c7d...', ('float32', 'int', 'int'), (2.0, 3, ...))
    """
    writer = _Writer(_DERIVED, functions=False)
    for t in tables:
        writer.form.append(f"table {t.dtype}")
        writer.value(tuple(t.shape))
    form, dtypes, numbers = _written(writer, traced)
    return form + _TABLE * len(tables), dtypes, numbers


def has_tables(signature: Signature) -> bool:
    """Return whether the trace had tables (`tpu_core.lowering.tables`)."""
    return signature[0].endswith(_TABLE)


def exact_signature(traced: ClosedJaxpr | Jaxpr) -> Signature:
    """The signature of a jaxpr with every parameter; equal in this process alone."""
    return _written(_Writer({}, functions=True), traced)


def _written(writer: _Writer, traced: ClosedJaxpr | Jaxpr) -> Signature:
    writer.value(traced)
    form = hashlib.sha256("|".join(writer.form).encode()).hexdigest()
    return form, tuple(writer.dtypes), tuple(writer.numbers)


# Ends a digest for each table.
_TABLE = "+"

Reader = Callable[[Any], Any]


class _Writer:
    """Takes a trace apart into its form and its numbers.

    Args:
        derived: By primitive and parameter, the part of it that is read.
        functions: Whether functions among the parameters count, by identity: rules of derivatives
            and the like are new objects in each trace.
    """

    def __init__(self, derived: dict[tuple[str, str], Reader], functions: bool) -> None:
        self.form: list[str] = []
        self.dtypes: list[str] = []
        self.numbers: list[float] = []
        self._derived = derived
        self._functions = functions

    def _number(self, value: Any, dtype: str) -> None:
        self.form.append(f"number {dtype}")
        self.dtypes.append(dtype)
        self.numbers.append(value)

    def closed(self, traced: ClosedJaxpr) -> None:
        for value in traced.consts:
            self.array(value)
        self.jaxpr(traced.jaxpr)

    def jaxpr(self, jaxpr: Jaxpr) -> None:
        names: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            names[variable] = len(names)
        sizes: dict[Any, Any] = {}
        for eqn in jaxpr.eqns:
            if _is_size(eqn, sizes):
                continue
            self.form.append(eqn.primitive.name)
            for atom in eqn.invars:
                self.atom(atom, names, sizes)
            for name, value in sorted(eqn.params.items()):
                self.form.append(name)
                self.value(self._derived.get((eqn.primitive.name, name), _whole)(value))
            for variable in eqn.outvars:
                names[variable] = len(names)
                aval: Any = variable.aval
                self.form.append(str(aval.dtype))
                self.value(aval.shape)
        for atom in jaxpr.outvars:
            self.atom(atom, names, sizes)

    def atom(self, atom: Any, names: dict[Any, int], sizes: dict[Any, Any]) -> None:
        if not isinstance(atom, Literal):
            if atom in sizes:
                self._number(sizes[atom], str(atom.aval.dtype))
                return
            self.form.append(str(names[atom]))
            return
        value = np.asarray(atom.val)
        if value.ndim == 0 and value.dtype.kind in "iuf":
            aval: Any = atom.aval  # declared without a dtype; a literal's is an array's
            self._number(value.item(), str(aval.dtype))
        else:
            self.array(value)

    def array(self, value: Any) -> None:
        array = np.asarray(value)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        self.form.append(f"{array.dtype}{array.shape}{digest}")

    def value(self, value: Any) -> None:
        if isinstance(value, ClosedJaxpr):
            self.closed(value)
        elif isinstance(value, Jaxpr):
            self.jaxpr(value)
        elif isinstance(value, (bool, str)) or value is None:
            self.form.append(str(value))
        elif isinstance(value, (int, np.integer)):
            self._number(int(value), "int")
        elif is_symbolic_dim(value):
            self._number(value, "int")
        elif isinstance(value, (float, np.floating)):
            self._number(float(value), "float64")
        elif isinstance(value, (tuple, list)):
            self.form.append(f"{type(value).__name__}{len(value)}")
            for v in value:
                self.value(v)
        elif isinstance(value, (np.ndarray, jax.Array)):
            self.array(value)
        elif isinstance(value, type):
            self.form.append(f"{value.__module__}.{value.__qualname__}")
        elif callable(value):
            self.form.append(f"function {id(value)}" if self._functions else "function")
        else:
            self.form.append(type(value).__name__ if _has_address(value) else repr(value))


def _is_size(eqn: Any, sizes: dict[Any, Any]) -> bool:
    """Return whether an equation makes an array of a symbolic dim: of an integer, a literal."""
    if eqn.primitive.name == "dim_as_value":
        sizes[eqn.outvars[0]] = eqn.params["dim"]
        return True
    (source, *others) = eqn.invars or (None,)
    if eqn.primitive.name != "convert_element_type" or isinstance(source, Literal):
        return False
    if source not in sizes or others:
        return False
    sizes[eqn.outvars[0]] = sizes[source]
    return True


def _has_address(value: Any) -> bool:
    return type(value).__repr__ is object.__repr__


def _whole(value: Any) -> Any:
    return value


def _starts(padding: Any) -> Any:
    return [low for low, *_ in padding]


# The parts of parameters that rules read; the rest follows from the sizes of the result.
_DERIVED: dict[tuple[str, str], Reader] = {
    ("conv_general_dilated", "padding"): _starts,
    # What follows the elements is the rest of the result, unless that is nothing.
    ("pad", "padding_config"): lambda config: [
        (low, int(high == 0), inner) for low, high, inner in config
    ],
    ("slice", "limit_indices"): lambda _: None,
    **{(f"reduce_window{kind}", "padding"): _starts for kind in ("", "_sum", "_max", "_min")},
}

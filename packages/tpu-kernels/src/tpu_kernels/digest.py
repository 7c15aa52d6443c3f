"""A hash of what a traced JAX function computes, the same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest(traced: ClosedJaxpr) -> str:
    """Hex digest of a function's ops, parameters, types and constants.

    Example:
        >>> digest(jax.make_jaxpr(jnp.sin)(1.0)) == digest(jax.make_jaxpr(jnp.sin)(2.0))
        True
    """
    writer = _Writer()
    writer.value(traced)
    return writer.hash.hexdigest()


class _Writer:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.scopes: list[dict[Any, int]] = []  # of the functions around, the outermost first

    def text(self, text: str) -> None:
        self.hash.update(f"{len(text)}:{text}".encode())

    def jaxpr(self, jaxpr: Jaxpr) -> None:
        names: dict[Any, int] = {}
        self.scopes.append(names)

        def define(variables: Any) -> None:
            for v in variables:
                names[v] = len(names)
                self.text(str(v.aval))

        def use(atoms: Any) -> None:
            for atom in atoms:
                if isinstance(atom, Literal):
                    self.text(str(atom.aval))
                    self.value(atom.val)
                else:
                    self.text(f"%{names[atom]}")

        define((*jaxpr.constvars, *jaxpr.invars))
        for eqn in jaxpr.eqns:
            self.text(eqn.primitive.name)
            use(eqn.invars)
            self.value(eqn.params)
            define(eqn.outvars)
        use(jaxpr.outvars)
        self.scopes.pop()

    def outer(self, variable: Any) -> str:
        """Name of a variable of an enclosing function.

        Raises:
            LookupError: It is none of theirs.
        """
        for depth, names in enumerate(self.scopes):
            if variable in names:
                return f"%{depth}.{names[variable]}"
        raise LookupError(f"{variable} is of no function around")

    def value(self, value: Any) -> None:
        """Contents of a parameter; only these count, so addresses are left out."""
        self.text(type(value).__qualname__)
        if isinstance(value, ClosedJaxpr):
            self.value(list(value.consts))
            self.jaxpr(value.jaxpr)
        elif isinstance(value, Jaxpr):
            self.jaxpr(value)
        elif isinstance(value, Mapping):
            self.value([x for k in sorted(value, key=str) for x in (str(k), value[k])])
        elif isinstance(value, (tuple, list)):
            self.text(str(len(value)))
            for item in value:
                self.value(item)
        elif isinstance(value, (set, frozenset)):
            self.value(sorted(_ADDRESS.sub("", repr(v)) for v in value))
        elif isinstance(value, Tracer) and (variable := getattr(value, "val", None)) is not None:
            # From jax 0.11 on: a variable of a function around, among an inner one's constants.
            self.text(self.outer(variable))
        elif _is_array(value):
            array = np.asarray(value)
            self.text(f"{array.dtype}{array.shape}")
            self.hash.update(array.tobytes())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self.value(getattr(value, field.name, None))
        elif callable(value):
            # Rules of derivatives; what they compute is traced where it is used.
            self.text(getattr(value, "__qualname__", ""))
        else:
            self.text(_ADDRESS.sub("", repr(value)))


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype")

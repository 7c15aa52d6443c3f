"""Sharding constraints that lowerings put on values of a program for several devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from tpu_compile.aot.sharding import Spec

_mesh: ContextVar[AbstractMesh | None] = ContextVar("mesh", default=None)


@contextmanager
def over(mesh: AbstractMesh) -> Iterator[None]:
    """`constrain` divides over this mesh in the block."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def current_mesh() -> AbstractMesh | None:
    """The mesh of the program that is lowered; None where it has one device."""
    mesh = _mesh.get()
    return mesh if mesh is not None and mesh.size > 1 else None


def constrain(value: jax.Array, spec: Spec | None, open_rest: bool = False) -> jax.Array:
    """``value``, divided as ``spec`` says.

    Args:
        value: Any array.
        spec: Of its leading dimensions; None puts no constraint.
        open_rest: Leave the dimensions of ``spec`` that are None, and those after it, to XLA.
    """
    mesh = current_mesh()
    if mesh is None or spec is None:
        return value
    free = PartitionSpec.UNCONSTRAINED
    whole: list[Any] = [*spec, *[None] * (value.ndim - len(spec))]
    whole = [free if axes is None and open_rest else axes for axes in whole]
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*whole)))

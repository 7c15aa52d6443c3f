"""StableHLO annotations that lowerings write beside the ops: shardings of values, names of
modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from torch.fx import Node

from tpu_compile.aot.sharding import Spec
from tpu_core.extend import divided

_mesh: ContextVar[AbstractMesh | None] = ContextVar("mesh", default=None)


@contextmanager
def over(mesh: AbstractMesh) -> Iterator[None]:
    """`constrain` divides over this mesh in the block."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def constrain(value: jax.Array, spec: Spec, open_rest: bool = False) -> jax.Array:
    """``value``, divided as ``spec`` says.

    Args:
        value: Any array.
        spec: Of its leading dimensions.
        open_rest: Leave the dimensions of ``spec`` that are None, and those after it, to XLA.
    """
    mesh = _mesh.get()
    if mesh is None or mesh.size == 1:
        return value
    free = PartitionSpec.UNCONSTRAINED
    whole: list[Any] = [*spec, *[None] * (value.ndim - len(spec))]
    whole = [free if axes is None and open_rest else axes for axes in whole]
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*whole)))


def in_halves(value: jax.Array, spec: Spec) -> jax.Array:
    """An input of the program; one of 64-bit integers is put together from its halves.

    XLA works on halves of 64 bits, and where it divides one further than the input is, it slices
    the input before. libtpu 0.0.42.1 ends with a failed check for such a slice on tpu7x. A half
    that is divided as the input can only be sliced itself.

    Args:
        value: The input.
        spec: Its partition spec.
    """
    mesh = _mesh.get()
    if mesh is None or mesh.size == 1 or value.dtype not in (jnp.int64, jnp.uint64):
        return value
    low = constrain(value.astype(jnp.uint32), spec)
    high = constrain((value >> 32).astype(jnp.uint32), spec)
    return (high.astype(value.dtype) << 32) | low.astype(value.dtype)


def divide_value(
    value: jax.Array, dims: Sequence[tuple[str, ...]], whole_over: Sequence[str], is_closed: bool
) -> jax.Array:
    """``value``, divided by some axes; see `tpu_compile.aot.sharding_ops.TensorSharding`."""
    mesh = _mesh.get()
    if mesh is None or mesh.size == 1:
        return value
    if is_closed:
        return constrain(value, tuple(dims))
    return divided(value, mesh, dims, whole_over)


def scope(node: Node) -> AbstractContextManager[Any]:
    """Names op and module in XLA's metadata: ``backward(blocks.0.up)/mm``."""
    if str(node.target).startswith("tpu_compile.planned_layers"):
        return nullcontext()  # what is in the loop has names of its own
    custom = node.meta.get("custom", {})
    module, phase = custom.get("module", ""), custom.get("phase", "")
    where = f"{phase}({module})" if phase and module else phase or module
    name = str(node.target).removeprefix("aten.").removesuffix(".default")
    return jax.named_scope(f"{where}/{name}" if where else name)

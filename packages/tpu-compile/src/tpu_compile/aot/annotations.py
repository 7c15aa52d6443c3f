"""What lowerings write into StableHLO beside the ops: shardings of values, names of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from torch.fx import Node

from tpu_compile.aot.sharding import Spec
from tpu_core.pjrt.shardings import divided

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


def divide_value(
    value: jax.Array, dims: Sequence[tuple[str, ...]], whole_over: Sequence[str], is_closed: bool
) -> jax.Array:
    """``value``, divided by some axes; see `tpu_compile.aot.divided.Division`."""
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

"""StableHLO annotations of planned programs beside the ops: shardings of values, names of
modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from torch.fx import Node

from tpu_compile.aot.sharding import Spec
from tpu_compile.sharding_constraints import constrain, current_mesh
from tpu_core.extend import divided


def in_halves(value: jax.Array, spec: Spec) -> jax.Array:
    """An input of the program; one of 64-bit integers is put together from its halves.

    XLA works on halves of 64 bits, and where it divides one further than the input is, it slices
    the input before. libtpu 0.0.42.1 ends with a failed check for such a slice on tpu7x. A half
    that is divided as the input can only be sliced itself.

    Args:
        value: The input.
        spec: Its partition spec.
    """
    if current_mesh() is None or value.dtype not in (jnp.int64, jnp.uint64):
        return value
    low = constrain(value.astype(jnp.uint32), spec)
    high = constrain((value >> 32).astype(jnp.uint32), spec)
    return (high.astype(value.dtype) << 32) | low.astype(value.dtype)


def divide_value(
    value: jax.Array, dims: Sequence[tuple[str, ...]], whole_over: Sequence[str], is_closed: bool
) -> jax.Array:
    """``value``, divided by some axes; see `tpu_compile.aot.sharding_ops.TensorSharding`."""
    mesh = current_mesh()
    if mesh is None:
        return value
    if is_closed:
        return constrain(value, tuple(dims))
    return divided(value, mesh, dims, whole_over)


def label(node: Node) -> str:
    """Module and op of a node, as costs by module read it: ``backward(blocks.0.up)/mm``."""
    custom = node.meta.get("custom", {})
    module, phase = custom.get("module", ""), custom.get("phase", "")
    where = f"{phase}({module})" if phase and module else phase or module
    name = str(node.target).removeprefix("aten.").removesuffix(".default")
    return f"{where}/{name}" if where else name


def scope(node: Node) -> AbstractContextManager[Any]:
    """Write `label` into XLA's metadata; ops of the layers in a loop have labels of their own."""
    if str(node.target).startswith("tpu_compile.layers_"):
        return nullcontext()
    return jax.named_scope(label(node))

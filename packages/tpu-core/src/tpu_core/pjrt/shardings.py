"""Annotations of programs for Shardy, and what it makes of them, through jax's private API."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager
from jax._src.lib.mlir.dialects import sdy
from jax._src.named_sharding import SdyArray, SdyDim
from jax.sharding import AbstractMesh

# Functions are inlined so that an op has one place, and its name all scopes.
_PIPELINE = "builtin.module(inline,sdy-propagation-pipeline)"


def propagated(lowered: Any, op_name: str) -> list[tuple[str, list[list[tuple[str, ...]]]]]:
    """Shardings of some ops' results, where XLA decides as Shardy does.

    Args:
        lowered: From ``jax.jit(...).trace(...).lower(...)``; is not changed.
        op_name: Of the ops, ``"stablehlo.optimization_barrier"``.

    Returns:
        Of each op with that name its location, which has the names of its scopes, and for each
        result the axes that divide each dimension.
    """
    bytecode = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        return [
            (str(op.location), [_axes(op, i) for i in range(len(op.results))])
            for op in _walk(module.operation)
            if op.name == op_name
        ]


def _walk(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


def _axes(op: Any, result: int) -> list[tuple[str, ...]]:
    rank = ir.RankedTensorType(op.results[result].type).rank
    if "sdy.sharding" not in op.attributes:
        return [()] * rank
    sharding = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings[result]
    dimensions = sdy.TensorShardingAttr(sharding).dimension_shardings
    return [_names(sdy.DimensionShardingAttr(d).axes) for d in dimensions]


def _names(axes: Any) -> tuple[str, ...]:
    """Whole axes; a part of one is left out, and what it divides is gathered."""
    refs = [sdy.AxisRefAttr(a) for a in axes]
    return tuple(a.name for a in refs if a.sub_axis_info is None)


_divided = core.Primitive("divided")
_divided.def_abstract_eval(lambda aval, **_: aval)


def _lower_divided(ctx: Any, value: Any, *, sharding: Any) -> list[Any]:
    return [mlir.wrap_with_sharding_op(ctx, value, ctx.avals_out[0], sharding)]


mlir.register_lowering(_divided, _lower_divided)


def divided(
    value: jax.Array,
    mesh: AbstractMesh,
    dims: Sequence[tuple[str, ...]],
    whole_over: Collection[str] = (),
) -> jax.Array:
    """``value``, divided by some axes of a mesh, and by the others as XLA likes.

    `jax.lax.with_sharding_constraint` can leave a dimension to XLA, but not with the exception of
    an axis.

    Args:
        value: A traced array.
        mesh: The devices.
        dims: The axes that divide each dimension; where there are none, XLA may choose.
        whole_over: Axes that must divide no dimension.

    Example:
        >>> divided(x, mesh, [("data",), ()], whole_over=("model",))
    """
    sharding = SdyArray(
        mesh_shape=mesh.shape_tuple,
        dim_shardings=tuple(SdyDim(axes=axes, is_open=not axes) for axes in dims),
        replicated_axes=frozenset(whole_over),
    )
    made: jax.Array = _divided.bind(value, sharding=sharding)
    return made

"""Sharding rules of DTensor for ops of this device that PyTorch has none for: attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Outputs and inputs of an op on one dim of the mesh; None for what is no tensor.
Placements = list[Any]


def register() -> None:
    """Tell DTensor the rules. Called when `torch.distributed.tensor` has been imported."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    aten = torch.ops.aten
    rules: dict[Any, tuple[Callable[[Any], list[Placements]], int]] = {
        aten._scaled_dot_product_fused_attention_overrideable.default: (_forward, 4),
        aten._scaled_dot_product_fused_attention_overrideable_backward.default: (_backward, 10),
    }
    # `torch.distributed.tensor.experimental.register_sharding` would import Dynamo.
    propagator = DTensor._op_dispatcher.sharding_propagator
    for op, (rule, numbers_from) in rules.items():
        info = RuntimeSchemaInfo(numbers_from, ["scale"], needs_pytree=True)
        propagator.register_op_strategy(op, _strategy(rule, len(op._schema.returns)), info)


def _strategy(rule: Callable[[Any], list[Placements]], outputs: int) -> Callable[[Any], Any]:
    def strategy(schema: Any) -> Any:
        from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

        mesh = schema.get_mesh_from_args(validate=False)
        return expand_to_full_mesh_op_strategy(mesh, schema, rule(schema), input_index=outputs)

    return strategy


def _forward(schema: Any) -> list[Placements]:
    """Output and logsumexp divided as the queries are."""
    from torch.distributed.tensor import Replicate

    query, key, _, bias = [*schema.args_schema, None][:4]
    ways = []
    for way in _ways(query, key):
        placements = [way] * 2 + [None] * 4 + [Replicate()] * 2 + [None]  # the seeds of dropout
        ways.append(placements + [way] * 3 + _of_bias(bias, way))
    return ways


def _backward(schema: Any) -> list[Placements]:
    """The gradients divided as what they are of."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    args = schema.args_schema
    query, key, bias = args[1], args[2], args[4]
    ways = []
    for way in _ways(query, key):
        of_bias = _of_bias(bias, way)
        grad_of_bias: Placements = [None]
        if of_bias:
            is_summed = isinstance(way, Shard) and not isinstance(of_bias[0], Shard)
            grad_of_bias = [Partial() if is_summed else of_bias[0]]
        seeds = [Replicate() for arg in args[14:16] if _is_tensor(arg)]
        # grad_out, query, key and value; out and logsumexp.
        ways.append([way] * 3 + grad_of_bias + [way] * 4 + of_bias + [way] * 2 + seeds)
    return ways


def _ways(query: Any, key: Any) -> list[Any]:
    """In which dims of queries, keys and values a mesh can divide attention: batch and heads."""
    from torch.distributed.tensor import Replicate, Shard

    heads, shared = query.shape[1], key.shape[1]
    # Where heads of queries share those of keys, parts must not differ in size.
    by_heads = heads == shared or shared % query.mesh.size() == 0
    return [Replicate(), Shard(0), *([Shard(1)] if by_heads else [])]


def _of_bias(bias: Any, way: Any) -> Placements:
    """Placement of a mask that is broadcast to `[batch, heads, queries, keys]`, in a list."""
    from torch.distributed.tensor import Replicate, Shard

    if not _is_tensor(bias):
        return []
    if isinstance(way, Shard):
        dim = way.dim - 4 + len(bias.shape)
        if dim >= 0 and bias.shape[dim] > 1:
            return [Shard(dim)]
    return [Replicate()]


def _is_tensor(arg: Any) -> bool:
    from torch.distributed.tensor._op_schema import OpStrategy

    return isinstance(arg, OpStrategy)

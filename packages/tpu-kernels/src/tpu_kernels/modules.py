"""A PyTorch module as a pure JAX function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tpu_core.errors import UnsupportedOpError
from tpu_core.extend import (
    GraphEvaluator,
    copy_to_jax,
    decompositions,
    find_lowering,
    load_lowerings,
    to_torch_dtype,
)


def to_jax_function(module: nn.Module) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """A module's forward as a pure JAX function, for `jax.jit`, `jax.grad` and `jax.vmap`.

    The module is traced once for each set of argument shapes, as it then is: ``module.train()``
    and ``module.eval()`` decide what it does. Running statistics are read and not updated.

    Args:
        module: On any device. Its forward takes and returns pytrees of tensors; other arguments
            are constants of the trace.

    Returns:
        ``fn(params, *args, key=None)`` and ``params``, parameters and buffers by name. Where the
        module draws random numbers, ``key`` is a key of ``jax.random``.

    Raises:
        UnsupportedOpError: In a call, an op has no lowering.
        ValueError: The module draws random numbers, and no key was given.

    Example:
        >>> fn, params = tpu_kernels.to_jax_function(torch.nn.Linear(4, 2))
        >>> jax.grad(lambda p, x: fn(p, x).sum())(params, jnp.ones((3, 4)))
    """
    load_lowerings()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graphs: dict[Any, tuple[GraphModule, Any]] = {}

    def fn(params: dict[str, Any], *args: Any, key: Any = None) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((params, args))
        is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
        arrays = [jnp.asarray(x) for x, a in zip(leaves, is_array) if a]
        others = tuple("" if a else x for x, a in zip(leaves, is_array))
        avals = tuple((x.shape, np.dtype(x.dtype)) for x in arrays)
        signature = (tree, tuple(is_array), others, avals, module.training)
        found = graphs.get(signature)
        if found is None:
            found = graphs[signature] = _trace(module, tree, is_array, others, avals)
        graph, result = found
        if key is None and any(_is_random(n) for n in graph.graph.nodes):
            raise ValueError(
                f"{type(module).__name__} draws random numbers: call fn(params, ..., "
                "key=jax.random.key(0)), or put it in eval mode before its first call."
            )
        results = GraphEvaluator.run(graph, arrays, None if key is None else _words(key))
        return jax.tree_util.tree_unflatten(result, results)

    return fn, {name: copy_to_jax(t) for name, t in state.items()}


def _words(key: Any) -> Any:
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if is_typed else key


def _trace(
    module: nn.Module,
    tree: Any,
    is_array: Sequence[bool],
    others: Sequence[Any],
    avals: Sequence[tuple[tuple[int, ...], Any]],
) -> tuple[GraphModule, Any]:
    """A graph of functional overloads over the flat arrays, and the structure of its results."""
    structure: list[Any] = []

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        stream = iter(tensors)
        leaves = [next(stream) if a else x for a, x in zip(is_array, others)]
        params, args = jax.tree_util.tree_unflatten(tree, leaves)
        result = torch.func.functional_call(module, params, args)
        flat, spec = pytree.tree_flatten(result)
        structure[:] = [jax.tree_util.tree_structure(pytree.tree_unflatten([0] * len(flat), spec))]
        return flat

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty(shape, dtype=to_torch_dtype(dtype), device="tpu") for shape, dtype in avals
        ]
    with mode, torch.no_grad():
        graph = make_fx(
            torch.func.functionalize(call, remove="mutations_and_views"),
            decomposition_table={o: f for o, f in decompositions().items() if not o.is_view},
            tracing_mode="real",
        )(*fakes)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        node.target = op = _without_view(node.target)
        if find_lowering(op) is None:
            raise UnsupportedOpError(
                f"{type(module).__name__} calls {op}, which has no lowering to JAX.",
                remedy="Write this part of the module with other ops, or leave it out.",
            )
    return graph, structure[0]


def _without_view(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The copying form of a view that a decomposition has left."""
    if not op.is_view:
        return op
    namespace, packet, overload = str(op).split(".")
    copying = getattr(getattr(torch.ops, namespace), f"{packet}_copy", None)
    return getattr(copying, overload, op)


def _is_random(node: torch.fx.Node) -> bool:
    entry = find_lowering(node.target) if node.op == "call_function" else None
    return entry is not None and entry.draws(node.args, node.kwargs)

"""An exported program as a JAX function whose sizes may be symbolic."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tpu_compile.faults import REFUSED
from tpu_compile.fx_utils import line_of, lowering_of
from tpu_compile.graphs import decompositions
from tpu_compile.refusals import is_refused
from tpu_core.errors import ExportError
from tpu_core.extend import GraphEvaluator, RandomKey, find_lowering, load_lowerings


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """The program in overloads that have lowerings, as far as PyTorch's decompositions lead there.

    Raises:
        ExportError: An overload has neither.
    """
    load_lowerings()
    table = torch.export.default_decompositions()
    for op in list(table.keys()):
        if lowering_of(op) is not None:
            table.pop(op)
    for op, function in decompositions().items():
        table[op] = function
    # Its parts have strides of their own, which views recorded behind it may not fit.
    table.pop(_ATTENTION)
    result = program.run_decompositions(table)
    for node in result.graph.nodes:
        if node.op == "call_function" and not _is_known(node):
            raise ExportError(
                f"{node.target} cannot be exported: it has no lowering.", line=line_of(node)
            )
    return result


def _is_known(node: Node) -> bool:
    return (
        lowering_of(node.target) is not None
        or node.target is _ATTENTION
        or node.target is operator.getitem
        or _is_number(node.meta.get("val"))
        or node.target in _CHECKS
    )


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_FUSED = "aten._scaled_dot_product_fused_attention_overrideable.default"

# Checks of sizes: what is exported states them in the manifest.
_CHECKS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def dimension(value: Any, scope: Any) -> Any:
    """A size in JAX's symbolic shapes; a number stays what it is.

    Raises:
        ValueError: It is made by an operation that JAX's symbolic shapes do not have.

    Example:
        >>> dimension(x.shape[0] // 2, scope)
        floordiv(s0, 2)
    """
    return _dimension(value.node.expr, scope) if isinstance(value, torch.SymInt) else value


def _dimension(expression: Any, scope: Any) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_symbol:
        return jax.export.symbolic_shape(str(expression), scope=scope)[0]
    combine = _OPERATIONS.get(type(expression).__name__)
    if combine is None:
        raise ValueError(f"JAX has no symbolic size for {expression}")
    return functools.reduce(combine, (_dimension(a, scope) for a in expression.args))


# sympy's and PyTorch's operations on sizes.
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": jax.core.max_dim,
    "Min": jax.core.min_dim,
}


def as_function(module: GraphModule, scope: Any) -> Callable[..., list[jax.Array]]:
    """A function of the graph's tensor inputs.

    Args:
        module: A graph of overloads that have lowerings.
        scope: JAX's scope of the symbolic sizes, under the names they have in the graph.

    Returns:
        The function; where the graph `draws`, its last argument is the ``uint32[4]`` of `Draws`.

    Raises:
        ExportError: A lowering cannot do with a symbolic size. Raised where the function is traced.
    """
    has_draws = draws(module)

    def run(*inputs: jax.Array) -> list[jax.Array]:
        keys = Draws(inputs[-1]) if has_draws else None
        arrays = iter(inputs)
        metas = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
        given = [next(arrays) if isinstance(m, torch.Tensor) else m for m in metas]
        results = _Evaluator(scope, keys).results(module, given)
        (output,) = module.graph.find_nodes(op="output")
        return [r for r, n in zip(results, output.args[0], strict=True) if isinstance(n, Node)]

    return run


class _Evaluator(GraphEvaluator):
    """Evaluates an exported graph.

    Args:
        scope: JAX's scope of the symbolic sizes.
        keys: Of its random ops, if it has any.
    """

    def __init__(self, scope: Any, keys: Draws | None) -> None:
        self._scope, self._keys = scope, keys

    def _size(self, value: Any) -> Any:
        return dimension(value, self._scope)

    def call(self, node: Node, values: dict[Node, Any]) -> Any:
        try:
            if node.target in _CHECKS:
                return None
            if _is_number(node.meta.get("val")):
                return self._size(node.meta["val"])
            return self.called(node, values)
        except Exception as error:
            raise _refused(node, error) from error

    def call_op(self, node: Node, values: Mapping[Node, Any]) -> Any:
        given: Any
        if node.target is _ATTENTION:
            given = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            return _attention(self._key(node), *given[0], **given[1])
        entry = lowering_of(node.target)
        assert entry is not None
        if is_refused(node):
            raise TypeError(f"{REFUSED} (torch.export does not ask the kernel).")
        if node.target in _SYMBOLIC and _is_symbolic(node):
            shape = tuple(map(self._size, node.meta["val"].shape))
            given = torch.fx.node.map_arg(node.args, values.__getitem__)
            return _SYMBOLIC[node.target](shape, *given)
        return self.call_lowering(
            node, entry, _with_scalars(node, values), self._key(node), self._size
        )

    def _key(self, node: Node) -> jax.Array | None:
        return self._keys.key() if self._keys is not None and _is_random(node) else None


class Draws:
    """Keys of a program's random ops: what eager on the device draws from the same state.

    Args:
        words: ``uint32[4]``, low and high words of the generator's seed and of its offset.
    """

    def __init__(self, words: jax.Array) -> None:
        self._seed_low, self._seed_high = words[0], words[1]
        self._offset = words[2].astype(np.uint64) | words[3].astype(np.uint64) << np.uint64(32)
        self._count = 0

    def key(self) -> jax.Array:
        """The key of the next op; each takes one step of the generator."""
        offset = self._offset + np.uint64(4 * self._count)  # the generator's step
        self._count += 1
        low, high = offset.astype(np.uint32), (offset >> np.uint64(32)).astype(np.uint32)
        return RandomKey.derive(self._seed_low, self._seed_high, low, high)


def draws(module: GraphModule) -> int:
    """Number of a graph's random ops."""
    return sum(map(_is_random, module.graph.nodes))


def _is_random(node: Node) -> bool:
    if node.target is _ATTENTION:
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0))
    entry = lowering_of(node.target) if node.op == "call_function" else None
    return entry is not None and entry.draws(node.args, node.kwargs)


def _attention(
    random: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """`torch.nn.functional.scaled_dot_product_attention`, whose grouped queries need no repeats."""
    mask = attn_mask if mask is None else mask
    dropped = dropout or dropout_p
    entry = find_lowering(_FUSED)
    assert entry is not None  # one of ATen's
    made = entry.fn(query, key, value, mask, dropped, is_causal, scale=scale, key=random)
    out: jax.Array = made[0]
    return out


def _is_symbolic(node: Node) -> bool:
    source: Any = node.args[0]
    sizes = (*source.meta["val"].shape, *node.meta["val"].shape)
    return any(isinstance(n, torch.SymInt) for n in sizes)


def _reshape(shape: tuple[Any, ...], x: jax.Array, *_: Any) -> jax.Array:
    return x.reshape(shape)


def _slice(
    shape: tuple[Any, ...],
    x: jax.Array,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> jax.Array:
    dim, start = dim % x.ndim, start or 0
    if isinstance(start, int) and start < 0:
        start = jax.core.max_dim(x.shape[dim] + start, 0)
    part: jax.Array = jax.lax.slice_in_dim(x, start, start + (shape[dim] - 1) * step + 1, step, dim)
    return part


# Ops that are recorded with their sizes, by what they do where those are symbolic; PyTorch has
# worked out the shape of the result.
_SYMBOLIC: dict[Any, Callable[..., jax.Array]] = {
    torch.ops.aten.slice.Tensor: _slice,
    torch.ops.aten.view.default: _reshape,
    torch.ops.aten.reshape.default: _reshape,
    torch.ops.aten._unsafe_view.default: _reshape,
    torch.ops.aten.expand.default: lambda shape, x, *_: jnp.broadcast_to(x, shape),
}


def _with_scalars(node: Node, values: Mapping[Node, Any]) -> Mapping[Node, Any]:
    """The values, with symbolic sizes that the op computes with as arrays."""
    op: Any = node.target
    computed = {
        a: jnp.asarray(values[a])
        for schema, a in zip(op._schema.arguments, node.args)
        if isinstance(a, Node)
        and str(schema.type) in ("Tensor", "number", "Scalar")
        and jax.export.is_symbolic_dim(values[a])
    }
    return {**values, **computed} if computed else values


def _refused(node: Node, error: Exception) -> ExportError:
    return ExportError(f"{node.target} cannot be exported: {error}", line=line_of(node))

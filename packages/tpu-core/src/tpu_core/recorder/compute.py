"""The computation of a recorded node: a function over JAX values in a `NodePlan`.

Both kinds can be pickled, so that another process may lower what this one recorded, unless it is
local: what a compiled graph or a JAX function computes.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node

from tpu_core import interruptible
from tpu_core.dtypes import cast, to_numpy_dtype
from tpu_core.lowering import selections
from tpu_core.lowering.evaluate import call_lowering, to_jax
from tpu_core.lowering.random import fold_in
from tpu_core.lowering.registry import REGISTRY, Lowering
from tpu_core.pjrt import client as pjrt
from tpu_core.recorder import decompose
from tpu_core.recorder.functional_variants import overload_name, overload_of


class LoweringCompute:
    """Computation by a lowering of the registry.

    Args:
        entry: The lowering.
        out: Avals of its results, see `call_lowering`.
        contiguous: Whether each ``Tensor`` argument is.
    """

    __slots__ = ("_contiguous", "_entry", "_out")

    def __init__(self, entry: Lowering, out: tuple[Any, ...], contiguous: tuple[bool, ...]) -> None:
        self._entry, self._out, self._contiguous = entry, out, contiguous

    def __call__(self, positional: list[Any], keywords: dict[str, Any], key: Any) -> list[Any]:
        return flatten(
            call_lowering(
                self._entry, tuple(positional), keywords, self._out, key, self._contiguous
            )
        )

    @property
    def is_local(self) -> bool:
        """True if the lowering is of another package, registered in this process alone."""
        return self._entry.is_foreign

    @property
    def takes_symbolic_dims(self) -> bool:
        """True if one trace of the lowering, with symbolic dims, may stand for all sizes."""
        return self._entry.takes_symbolic_dims

    @property
    def op(self) -> str:
        """Name of the functional overload."""
        return self._entry.op

    @property
    def out(self) -> tuple[Any, ...]:
        """Metadata of the results."""
        return self._out

    @property
    def contiguous(self) -> tuple[bool, ...]:
        """Contiguity of each ``Tensor`` argument."""
        return self._contiguous

    def returning(self, out: tuple[Any, ...]) -> LoweringCompute:
        """The same with results of other shapes."""
        return LoweringCompute(self._entry, out, self._contiguous)

    def __reduce__(self) -> tuple[Any, ...]:
        return _lowering_of_name, (self._entry.op, self._out, self._contiguous)


def _lowering_of_name(
    op: str, out: tuple[Any, ...], contiguous: tuple[bool, ...]
) -> LoweringCompute:
    entry = REGISTRY.get(op)
    if entry is None:
        raise LookupError(f"{op} has no lowering in this process.")
    return LoweringCompute(entry, out, contiguous)


class GraphCompute:
    """Computation by PyTorch's decomposition, a graph over the flattened tensor arguments.

    Args:
        op: The functional overload.
        args: Its arguments, with meta tensors for tensors.
        out: Avals of its results, see `call_lowering`.

    Raises:
        UndecomposedOp: The decomposition has an overload without a lowering.
    """

    __slots__ = ("_args", "_default_dtype", "_graph", "_op", "_out")

    is_local = False

    def __init__(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], out: tuple[Any, ...]
    ) -> None:
        self._op, self._args, self._out = op, args, out
        self._default_dtype = torch.get_default_dtype()
        self._graph = decompose.trace(op, args)

    @property
    def op(self) -> str:
        """Name of the functional overload."""
        return overload_name(self._op)

    @property
    def ops(self) -> list[str]:
        """Names of the overloads whose lowerings it calls."""
        return [str(n.target) for n in self._graph.graph.nodes if n.op == "call_function"]

    @property
    def out(self) -> tuple[Any, ...]:
        """Metadata of the results."""
        return self._out

    def __call__(self, positional: list[Any], keywords: dict[str, Any], key: Any) -> list[Any]:
        tensors = [
            x
            for value in (*positional, *keywords.values())
            for x in (value if isinstance(value, list) else [value])
            if isinstance(x, (jax.Array, jnp.ndarray)) and not getattr(x, "weak_type", False)
        ]
        results = GraphEvaluator.run(self._graph, tensors, key)
        return [
            None if e is None else cast(jnp.asarray(r), e.dtype)
            for r, e in zip(flatten(tuple(results)), flatten(self._out), strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        name, default = overload_name(self._op), self._default_dtype
        return _graph_of_name, (name, self._args, self._out, default)


def _graph_of_name(
    op: str, args: tuple[Any, ...], out: tuple[Any, ...], default_dtype: torch.dtype
) -> GraphCompute:
    # A worker traces with the dtype of the process that recorded the op.
    before = torch.get_default_dtype()
    if before == default_dtype:
        return GraphCompute(overload_of(op), args, out)
    torch.set_default_dtype(default_dtype)
    try:
        return GraphCompute(overload_of(op), args, out)
    finally:
        torch.set_default_dtype(before)


# The results of an op that is called again, with its first argument changed by a function.
Again = Callable[[Callable[[Any], Any]], Any]
# Called with the name of an op inside a graph and its results; gives what is read of them.
Change = Callable[[str, Any, Again], Any]
_change: ContextVar[Change | None] = ContextVar("tpu_graph_results", default=None)


@contextmanager
def changing_results(change: Change | None) -> Iterator[None]:
    """Change the results of the ops inside graphs that are evaluated in the block.

    Example:
        >>> with changing_results(lambda op, results, again: jax.tree.map(jnp.ceil, results)):
        ...     plan.lower(values, numbers)
    """
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)


Compute = LoweringCompute | GraphCompute
"""Called with positional arguments, keyword arguments and the key of a random op."""


def flatten(results: tuple[Any, ...]) -> list[Any]:
    """Results with lists flattened, undefined ones kept as None."""
    flat: list[Any] = []
    for r in results:
        flat.extend(r if isinstance(r, (list, tuple)) else [r])
    return flat


def _entry_of_name(target: Any) -> Lowering | None:
    return REGISTRY.get(str(target))


class GraphEvaluator(ABC):
    """Evaluator of FX graphs of functional overloads on JAX values.

    The one walk over a graph; subclasses say what its nodes are beyond calls of lowerings. `run` is
    for a graph that has no others.

    Example:
        >>> class Evaluator(GraphEvaluator):
        ...     def call_op(self, node, values):
        ...         entry = find_lowering(node.target)
        ...         return self.call_lowering(node, entry, values)
        >>> Evaluator().results(module, [x, y])
    """

    def values(self, module: GraphModule, arguments: Iterable[Any]) -> dict[Node, Any]:
        """The value of each node.

        Args:
            module: The graph.
            arguments: Values of its placeholders.
        """
        values: dict[Node, Any] = {}
        given = iter(arguments)
        compared = self.compared(module)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = self.argument(node, next(given))
            elif node.op == "get_attr":
                values[node] = self.constant(getattr(module, str(node.target)))
            elif node.op != "output":
                value = self.call(node, values)
                is_compared = node in compared and isinstance(value, jax.Array)
                values[node] = selections.shared(value) if is_compared else value
        return values

    @staticmethod
    def refuses(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
        """Return whether PyTorch's CPU kernel refuses a call that a meta function let pass.

        Args:
            op: A functional overload.
            args: All arguments in the order of its schema, tensors on the device. Their values do
                not count.

        Example:
            >>> GraphEvaluator.refuses(torch.ops.aten.mm.default, (x.int(), x))
            True
        """
        from tpu_core.recorder.error_parity import Refused
        from tpu_core.recorder.meta import run_meta

        try:
            run_meta(op, args)
        except Refused:
            return True
        except Exception as error:
            # No answer: tracing has asked the meta function, and raised what it had to say.
            interruptible.pass_on(error)
        return False

    def results(self, module: GraphModule, arguments: Iterable[Any]) -> list[Any]:
        """Results of the graph; arguments as of `values`."""
        values = self.values(module, arguments)
        (output,) = module.graph.find_nodes(op="output")
        result = torch.fx.node.map_arg(output.args[0], values.__getitem__)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    @staticmethod
    def run(
        graph: GraphModule,
        tensors: Sequence[jax.Array],
        key: Any = None,
        entry_of: Callable[[Any], Lowering | None] = _entry_of_name,
        scope: Callable[[Node], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Any]:
        """Results of a graph that has overloads with lowerings and nothing else.

        Args:
            graph: The graph.
            tensors: Its inputs.
            key: Each random overload gets a key of its own, derived from this one.
            entry_of: The lowering of an overload.
            scope: Entered around the lowering of each node.

        Raises:
            LookupError: An overload has no lowering.

        Example:
            >>> (y,) = GraphEvaluator.run(module, [x], key)
        """
        return _Plain(key, entry_of, scope).results(graph, tensors)

    @staticmethod
    def avals(meta: Any, size: Callable[[Any], int] = int) -> Any:
        """`jax.ShapeDtypeStruct` for each tensor of a node's metadata, None for what is none.

        Args:
            meta: A fake tensor or a list of them.
            size: Value of a size.

        Example:
            >>> GraphEvaluator.avals(node.meta["val"])
            ShapeDtypeStruct(shape=(3, 4), dtype=float32)
        """
        if isinstance(meta, (list, tuple)):
            return [GraphEvaluator.avals(m, size) for m in meta]
        if isinstance(meta, torch.Tensor):
            return jax.ShapeDtypeStruct(tuple(map(size, meta.shape)), to_numpy_dtype(meta.dtype))
        return None

    @staticmethod
    def number(value: jax.Array) -> jax.Array:
        """A 0-d array as a number: weakly typed, so that it does not widen what it meets.

        Example:
            >>> GraphEvaluator.number(jnp.float64(2.0)) * jnp.ones(3, jnp.float32)  # float32
        """
        return pjrt.weak(value)

    def compared(self, module: GraphModule) -> set[Node]:
        """The nodes that the graph compares with themselves, computed once for all readers."""
        return selections.compared(module.graph)

    def argument(self, node: Node, value: Any) -> Any:
        """The value of a placeholder that is given one."""
        return value

    def constant(self, value: Any) -> Any:
        """The value of a ``get_attr`` node, from the module's attribute."""
        return to_jax(value)

    def call(self, node: Node, values: dict[Node, Any]) -> Any:
        """The value of a node that calls something, from those before it."""
        return self.called(node, values)

    def called(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """As `call`: an element of a result, or what an overload gives."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return values[source][node.args[1]]
        return self.call_op(node, values)

    def call_lowering(
        self,
        node: Node,
        entry: Lowering,
        values: Mapping[Node, Any],
        key: Any = None,
        size: Callable[[Any], int] = int,
    ) -> Any:
        """The value of a node that calls a functional overload, for `call_op`.

        Args:
            node: Calls a functional overload.
            entry: The overload's lowering.
            values: Values of the nodes before.
            key: Of a random op.
            size: Value of a size in the node's metadata.
        """
        op: Any = node.target
        args = torch.fx.node.map_arg(node.args, values.__getitem__)
        kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
        names = [a.name for a in op._schema.arguments]
        args = tuple(_thaw(a) for n, a in zip(names, args) if n not in Lowering.DROPPED_ARGUMENTS)
        kwargs = {k: _thaw(v) for k, v in kwargs.items() if k not in Lowering.DROPPED_ARGUMENTS}
        meta: Any = node.meta.get("val")
        count = len(op._schema.returns)
        several = count > 1
        out = tuple(self.avals(m, size) for m in (meta if several else (meta,) * count))
        contiguous = _contiguous(node, size) if entry.wants_contiguous else None
        result = call_lowering(entry, args, kwargs, out, key, contiguous)
        if (change := _change.get()) is not None:

            def again(alter: Callable[[Any], Any]) -> Any:
                altered = (alter(args[0]), *args[1:])
                return call_lowering(entry, altered, kwargs, out, key, contiguous)

            result = change(entry.op, result, again)
        if not count:  # an assertion
            return None
        return result if several else result[0]

    @abstractmethod
    def call_op(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """The value of a node that calls an overload."""


class _Plain(GraphEvaluator):
    """Evaluator of a graph that has overloads with lowerings and nothing else."""

    def __init__(
        self,
        key: Any,
        entry_of: Callable[[Any], Lowering | None],
        scope: Callable[[Node], AbstractContextManager[Any]],
    ) -> None:
        self._key, self._entry_of, self._scope = key, entry_of, scope
        self._draws = 0

    def call_op(self, node: Node, values: Mapping[Node, Any]) -> Any:
        entry = self._entry_of(node.target)
        if entry is None:
            raise LookupError(f"{node.target} has no lowering.")
        key = None
        if entry.draws(node.args, node.kwargs):
            key = fold_in(self._key, self._draws)
            self._draws += 1
        with self._scope(node):
            return self.call_lowering(node, entry, values, key)


def _contiguous(node: torch.fx.Node, size: Callable[[Any], int]) -> tuple[bool, ...]:
    """Return whether each tensor argument of a node is contiguous, as its metadata has it."""
    given = (*node.args, *node.kwargs.values())
    metas = (a.meta["val"] for a in given if isinstance(a, torch.fx.Node))
    return tuple(_is_contiguous(m, size) for m in metas if isinstance(m, torch.Tensor))


def _is_contiguous(t: torch.Tensor, size: Callable[[Any], int]) -> bool:
    # `Tensor.is_contiguous` would decide on symbolic sizes for all their values.
    shape, strides = [size(n) for n in t.shape], [size(n) for n in t.stride()]
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n != 1 and stride != expected:
            return 0 in shape
        expected *= n
    return True


def _thaw(value: Any) -> Any:
    """FX keeps lists in its own immutable class."""
    return [_thaw(v) for v in value] if isinstance(value, (list, tuple)) else value

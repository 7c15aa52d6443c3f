"""A graph as a list of steps, each a lowering of the registry with its arguments.

What FX holds as symbolic numbers and fake tensors is taken apart once, so that evaluating a graph
for one more size is cheap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch.fx import GraphModule, Node

from tpu_compile.sizes import Sizes, Symbols
from tpu_core.lowering.dtypes import to_numpy_dtype
from tpu_core.lowering.evaluate import DROPPED_ARGUMENTS, to_jax
from tpu_core.lowering.registry import REGISTRY, Lowering


@dataclass(frozen=True, slots=True)
class Reference:
    """The place of another step's value among the arguments."""

    step: int


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape, in numbers and terms, and dtype of a tensor."""

    shape: tuple[Any, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a graph.

    Attributes:
        kind: ``tensor`` or ``number`` (inputs), ``constant``, ``term``, ``item``, ``call``, or
            ``same`` as another step.
        value: The constant, the term, the index of the item, or the other step.
        args, kwargs: Arguments of a call, or the source of an item.
        entry: The lowering that is called.
        out: What it returns, see `call_lowering`; of an input what it is.
        several: Whether it has several returns.
    """

    kind: str
    value: Any = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    entry: Lowering | None = None
    out: tuple[Any, ...] = ()
    several: bool = False


def lowering_of(op: Any) -> Lowering | None:
    """The registry's entry for an overload of a graph; a view's is that of its copying form.

    Example:
        >>> lowering_of(torch.ops.aten.t.default).op
        'aten.t_copy.default'
    """
    name = str(op)
    if name in REGISTRY or not isinstance(op, torch._ops.OpOverload) or not op.is_view:
        return REGISTRY.get(name)
    namespace, packet, overload = name.split(".")
    return REGISTRY.get(f"{namespace}.{packet}_copy.{overload}")


def is_tensor(node: Node) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_number(value: Any) -> bool:
    """Whether a node's value is a number, symbolic or not."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def steps_of(module: GraphModule, symbols: Symbols) -> list[Step]:
    """A step for each node but the output, in the graph's order."""
    number = {node: i for i, node in enumerate(module.graph.nodes)}

    def freeze(value: Any) -> Any:
        if isinstance(value, Node):
            return Reference(number[value])
        if isinstance(value, (list, tuple)):
            return tuple(map(freeze, value))
        return symbols.term(value)

    steps = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            kind = "tensor" if is_tensor(node) else "number"
            steps.append(Step(kind, out=(aval_of(value, symbols),)))
        elif node.op == "get_attr":
            steps.append(Step("constant", to_jax(getattr(module, str(node.target)))))
        elif node.op == "output":
            break
        elif is_number(value):
            steps.append(Step("term", symbols.term(value)))
        elif node.target is operator.getitem:
            source, index = node.args
            steps.append(Step("item", index, (freeze(source),)))
        else:
            steps.append(_call_of(node, freeze, symbols))
    return steps


def _call_of(node: Node, freeze: Callable[[Any], Any], symbols: Symbols) -> Step:
    op: Any = node.target
    entry = lowering_of(op)
    assert entry is not None
    names = [a.name for a in op._schema.arguments]
    args = tuple(freeze(a) for n, a in zip(names, node.args) if n not in DROPPED_ARGUMENTS)
    kwargs = {k: freeze(v) for k, v in node.kwargs.items() if k not in DROPPED_ARGUMENTS}
    several = len(op._schema.returns) > 1
    meta = node.meta["val"]
    out = tuple(aval_of(m, symbols) for m in (meta if several else (meta,)))
    return Step("call", None, args, tuple(kwargs.items()), entry, out, several)


def aval_of(meta: Any, symbols: Symbols) -> Any:
    """What is known of a fake tensor, or of those in a list."""
    if isinstance(meta, (list, tuple)):
        return tuple(aval_of(m, symbols) for m in meta)
    if isinstance(meta, torch.Tensor):
        return Aval(tuple(map(symbols.term, meta.shape)), to_numpy_dtype(meta.dtype))
    return None


def once(steps: Sequence[Step]) -> list[Step]:
    """The steps with each call that has the form of an earlier one replaced by its result.

    Layers repeat: what a lowering makes of sizes is the same in all of them.
    """
    first: dict[str, int] = {}
    kept: list[Step] = []
    for i, step in enumerate(steps):
        if step.kind != "call" or step.entry is None or step.entry.random:
            kept.append(step)
            continue
        arguments = _form(steps, step.args), _form(steps, step.kwargs)
        earlier = first.setdefault(repr((step.entry.op, arguments, step.out)), i)
        kept.append(step if earlier == i else Step("same", earlier))
    return kept


def _form(steps: Sequence[Step], value: Any) -> Any:
    """Arguments with what is known of values in their place."""
    if isinstance(value, tuple):
        return tuple(_form(steps, v) for v in value)
    if not isinstance(value, Reference):
        return value
    source = steps[value.step]
    if source.kind in ("tensor", "call"):
        return source.out if source.several else source.out[0]
    if source.kind == "item":
        return _form(steps, source.args[0])[source.value]
    return source.value if source.kind == "term" else value


def resolved(value: Any, values: Sequence[Any], sizes: Sizes) -> Any:
    """Arguments of a call with values and numbers in place of references and terms."""
    if isinstance(value, Reference):
        return values[value.step]
    if isinstance(value, tuple):
        # FX has lists where schemas have, and lowerings expect them.
        return [resolved(v, values, sizes) for v in value]
    return sizes.value(value)


def concrete_out(out: Any, sizes: Sizes) -> Any:
    """What a call returns, for one set of sizes."""
    if isinstance(out, Aval):
        return jax.ShapeDtypeStruct(sizes.all(out.shape), out.dtype)
    return [concrete_out(o, sizes) for o in out] if isinstance(out, tuple) else None


Caller = Callable[[Lowering, tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]


def evaluate(
    steps: Iterable[Step],
    tensors: Iterable[Any],
    numbers: Iterable[int],
    sizes: Sizes,
    call: Caller,
) -> list[Any]:
    """The value of each step.

    Args:
        steps: The graph.
        tensors, numbers: Its inputs, apart.
        sizes: Values of its symbols.
        call: Calls a lowering with positional and keyword arguments and what it returns.
    """
    values: list[Any] = []
    arrays, integers = iter(tensors), iter(numbers)
    for step in steps:
        if step.kind == "tensor":
            values.append(next(arrays))
        elif step.kind == "number":
            values.append(next(integers, None))
        elif step.kind == "call":
            assert step.entry is not None
            args = tuple(resolved(a, values, sizes) for a in step.args)
            kwargs = {k: resolved(v, values, sizes) for k, v in step.kwargs}
            out = tuple(concrete_out(o, sizes) for o in step.out)
            result = call(step.entry, args, kwargs, out)
            values.append(result if step.several else result[0])
        elif step.kind == "same":
            values.append(values[step.value])
        elif step.kind == "item":
            values.append(resolved(step.args[0], values, sizes)[step.value])
        else:
            values.append(sizes.value(step.value))
    return values

"""Python functions to graphs of functional ATen ops, traced on fake tensors of device ``tpu``."""

from __future__ import annotations

import bisect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import module as module_hooks

from tpu_compile.aot.biases import add_late
from tpu_compile.aot.products import keep_rows
from tpu_compile.fx_utils import lowering_of
from tpu_compile.graphs import decompositions
from tpu_compile.lane_permutation import move_lanes
from tpu_core import extend
from tpu_core.errors import DataDependentError, UnsupportedOpError

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def fake_mode() -> FakeTensorMode:
    """A mode for fake tensors; constants of the model may be real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, lead: tuple[int, ...] = ()) -> Any:
    """A tensor without memory on ``tpu`` with the geometry of another one.

    Args:
        tensor: On any device, ``meta`` included.
        mode: Makes it.
        lead: Dimensions to put in front.
    """
    if lead:
        with mode:
            return torch.empty((*lead, *tensor.shape), dtype=tensor.dtype, device="tpu")
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="tpu")


_IDENTITIES = (
    *(torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default),
    *(torch.ops.aten.alias.default, torch.ops.aten.alias_copy.default),
)
_UNINITIALISED = (
    *(torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default),
    *(torch.ops.aten.empty_permuted.default, torch.ops.aten.empty_strided.default),
    *(torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default),
)
# Code whose lines are not the user's.
_INTERNAL = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, os.path.dirname(extend.__file__), os.path.dirname(__file__))
)


class Scopes:
    """Writes into each node of a graph which module made it, of forward and backward.

    Autograd numbers its nodes in the order of the forward pass, so that the number of a node tells
    the module that was running when it was made.

    Args:
        root: Its submodules are named.
        prefix: Before each name.
    """

    def __init__(self, root: torch.nn.Module, prefix: str = "") -> None:
        self._names = {
            id(m): ".".join(p for p in (prefix, name) if p) for name, m in root.named_modules()
        }
        self._stack = [prefix]
        self._changes: list[tuple[int, str]] = [(0, prefix)]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Name what is traced in the block."""
        before = module_hooks.register_module_forward_pre_hook(self._enter)
        after = module_hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with fx_traceback.preserve_node_meta():
                self._set(self._stack[-1])
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._changed()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._changed()

    def _changed(self) -> None:
        path = self._stack[-1]
        self._changes.append((torch.autograd._get_sequence_nr(), path))
        self._set(path)

    def _set(self, path: str, phase: str = "") -> None:
        fx_traceback.current_meta["custom"] = {"module": path, "phase": phase}

    def name_backward(self, roots: Sequence[torch.Tensor]) -> None:
        """Have the backward pass from ``roots`` named, too."""
        starts = [number for number, _ in self._changes]
        waiting = [t.grad_fn for t in roots if t.grad_fn is not None]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            place = bisect.bisect_right(starts, node._sequence_nr()) - 1
            node.register_prehook(self._backward_hook(self._changes[max(place, 0)][1]))
            waiting += [n for n, _ in node.next_functions if n is not None]

    def _backward_hook(self, path: str) -> Callable[[Any], None]:
        def hook(grads: Any) -> None:
            self._set(path, "backward")

        return hook

    def phase(self, name: str) -> None:
        """Attribute the ops that follow to ``name`` in place of a module."""
        self._set("", name)


@contextmanager
def values_unknown() -> Iterator[None]:
    """Reads of values in the block are errors that name the line.

    Raises:
        DataDependentError: There was one.
    """
    try:
        yield
    except _DATA_DEPENDENT as error:
        raise DataDependentError(
            "The program depends on the values of a tensor, and is compiled without them.",
            values={"op": str(getattr(error, "func", "")) or str(error).splitlines()[0]},
            line=_user_line(error),
        ) from error


def trace(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    keep_views: bool = False,
) -> GraphModule:
    """The graph of ``function(*inputs)``, free of views, mutations and what has no lowering.

    Args:
        function: Of tensors, returns a list of tensors; may run autograd.
        inputs: Fake tensors.
        mode: Theirs.
        keep_views: Leave views as they are: a partitioner knows that they cost nothing.

    Raises:
        DataDependentError: It depends on values.
        UnsupportedOpError: An op has neither a lowering nor a decomposition.
    """
    remove = "mutations" if keep_views else "mutations_and_views"
    with values_unknown(), enable_python_dispatcher(), mode:
        first = make_fx(function, tracing_mode="real")(*inputs)
        # Autograd cannot run inside functionalization: the graph it left is functionalized.
        with fx_traceback.preserve_node_meta(), torch.no_grad():
            graph = make_fx(
                torch.func.functionalize(Interpreter(first).run, remove=remove),
                decomposition_table=decompositions(),
                tracing_mode="real",
            )(*inputs)
    _simplify(graph)
    add_late(graph)
    keep_rows(graph)
    if not keep_views:  # a partitioner does not know what can be computed again
        move_lanes(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _check(graph)
    return graph


def _simplify(graph: GraphModule) -> None:
    """Remove what does nothing in a functional graph: writing inputs back, as their new values are
    outputs, and detaching. What is uninitialised becomes zeros, as where the device runs it.
    """
    for node in reversed(graph.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)
        elif node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif getattr(node.target, "namespace", "") == "profiler":
            graph.graph.erase_node(node)
        elif node.target in _UNINITIALISED:
            value = node.meta["val"]
            node.target = torch.ops.aten.full.default
            node.args, node.kwargs = (list(value.shape), 0), {"dtype": value.dtype}


def _check(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and lowering_of(node.target) is None:
            module = node.meta.get("custom", {}).get("module")
            raise UnsupportedOpError(
                f"{node.target} has neither a lowering nor a decomposition.",
                values={"module": module} if module else None,
            )


def _user_line(error: BaseException) -> str | None:
    """The line of the user's code nearest to where the error was raised."""
    frames = list(traceback.extract_tb(error.__traceback__))
    for frame in reversed(frames):
        if not frame.filename.startswith(("<", *_INTERNAL)):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None

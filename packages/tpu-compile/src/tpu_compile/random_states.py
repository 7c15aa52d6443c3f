"""Random states that checkpointing keeps from forward to backward, to draw the same again.

AOTAutograd wraps a random op that is recomputed in two higher-order ops: one returns the random
state before the op, the other runs the op from that state. Here the op stands by itself, and which
state it draws from is noted on its node; states stay on the host.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from tpu_compile.rng import STATE

_SAVES = torch.ops.higher_order.run_and_save_rng_state
_RESTORES = torch.ops.higher_order.run_with_rng_state


def state_of(drawn: Any) -> Any:
    """In a graph, the random state that an op took. It is a marker and never called."""
    raise RuntimeError("A random state is known to the caller of a graph alone.")


def drawn_op(node: Node) -> Any:
    """The random op that a node wraps, or None."""
    if node.target is _SAVES:
        return node.args[0]
    return node.args[1] if node.target is _RESTORES else None


def is_state(node: Node) -> bool:
    """Return whether the node's value is a random state."""
    if node.op == "placeholder":
        users = list(node.users)
        return bool(users) and all(u.target is _RESTORES and u.args[0] is node for u in users)
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    return isinstance(source, Node) and source.target is _SAVES and bool(index == 0)


def unwrap(module: GraphModule) -> None:
    """Put random ops in the place of the higher-order ops around them."""
    graph = module.graph
    for node in list(graph.nodes):
        op = drawn_op(node)
        if op is None:
            continue
        saves = node.target is _SAVES
        with graph.inserting_before(node):
            new = graph.call_function(op, node.args[1 if saves else 2 :], node.kwargs)
        new.meta = {**node.meta, "val": _metadata(new)}
        if not saves:
            new.meta[STATE] = node.args[0]
            node.replace_all_uses_with(new)
        for user in list(node.users) if saves else []:
            with graph.inserting_before(user):
                other = new if user.args[1] else graph.call_function(state_of, (new,))
            if not user.args[1]:
                other.meta = dict(user.meta)
            user.replace_all_uses_with(other)
            graph.erase_node(user)
        graph.erase_node(node)
    module.recompile()


def _metadata(node: Node) -> Any:
    """Results of the op as fake tensors: the partitioner leaves the wrapped op without."""
    target: Any = node.target
    args: Any = map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["val"])
    mode = detect_fake_mode((args, kwargs))
    assert mode is not None
    with mode:
        return target(*args, **kwargs)


class OpByOp(Interpreter):
    """Runs a graph that cannot be lowered: each op is recorded, and falls back where it has to."""

    def run_with(self, arguments: Sequence[Any], numbers: Mapping[Node, Any]) -> Any:
        """The results for some arguments, and numbers that are known already."""
        inputs = self.graph.find_nodes(op="placeholder")
        given = [numbers.get(node, value) for node, value in zip(inputs, arguments, strict=True)]
        return self.run(*given, initial_env={n: v for n, v in numbers.items() if n not in inputs})

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op; PyTorch knows the two random ones for its own devices alone."""
        random: Any = vars(torch)["tpu"]
        if target is _SAVES:
            return random.get_rng_state(), args[0](*args[1:], **kwargs)
        if target is _RESTORES:
            now = random.get_rng_state()
            random.set_rng_state(args[0])
            try:
                return args[1](*args[2:], **kwargs)
            finally:
                random.set_rng_state(now)
        return super().call_function(target, args, kwargs)

"""One layer of a stack, traced: its forward and its backward graph, and what is kept in between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile.fx_utils import line_label, outputs
from tpu_compile.keys import key_of
from tpu_compile.lane_permutation import move_lanes
from tpu_compile.rng import NUMBER, is_random

if TYPE_CHECKING:
    from tpu_compile.aot.sharding import Spec

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Annotations:
    """Annotations that the lowering of a layer writes beside its ops.

    Attributes:
        carry: Partition spec of the hidden state and its gradient, open in what it leaves out.
        own: Partition spec of each own tensor of the layer and its gradient.
        label: Name of an op in XLA's metadata.
    """

    carry: Spec | None = None
    own: tuple[Spec, ...] | None = None
    label: Callable[[Node], str] = field(default=line_label, repr=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is ready to be looped.

    Its inputs are the hidden state, its own tensors (parameters, then buffers), and the tensors
    that all layers share.

    Attributes:
        key: Hash of what it computes, the same in every process.
        forward: Graph of the inputs; it returns the hidden state, new values of the tensors that
            the layer writes, and what is kept.
        backward: Graph of what is kept and the hidden state's gradient; it returns the inputs'
            gradients, or None for one.
        own: Number of its own tensors.
        written: Inputs that it writes.
        kept: Operands of ``backward``: an input, or -1 for a result of ``forward``.
        draws: Whether it draws random numbers.
        is_recomputed: Whether ``backward`` runs the layer again.
        is_stacked: Whether an own tensor comes as one for all layers, with a dimension in front;
            else the tensors come layer by layer.
        annotations: For its lowering.
    """

    key: str
    forward: GraphModule
    backward: GraphModule | None
    own: int
    written: list[int]
    kept: list[int]
    draws: bool
    is_recomputed: bool
    is_stacked: bool
    annotations: Annotations

    def made(self) -> list[Tensor]:
        """Metadata of the results of ``forward`` behind the hidden state, of one layer."""
        return [n.meta["val"] for n in outputs(self.forward)[1:]]

    def read(self) -> tuple[list[int], list[int]]:
        """Inputs that ``backward`` reads beside what ``forward`` keeps: own ones, shared ones."""
        return self._grouped(sorted({k for k in self.kept if k > 0}))

    def graded(self) -> tuple[list[int], list[int]]:
        """Inputs that have gradients: own ones, shared ones."""
        assert self.backward is not None
        return self._grouped(
            [i for i, g in enumerate(outputs(self.backward)) if i and g is not None]
        )

    def _grouped(self, inputs: Sequence[int]) -> tuple[list[int], list[int]]:
        return [i for i in inputs if i <= self.own], [i for i in inputs if i > self.own]

    def gradients(self, inputs: Sequence[int]) -> list[Tensor]:
        """Metadata of the gradients of some inputs, of one layer."""
        assert self.backward is not None
        made = outputs(self.backward)
        return [made[i].meta["val"] for i in inputs]

    def flop_graphs(self) -> list[GraphModule]:
        """Graphs that together hold each product of a step once."""
        if self.backward is None:
            return [self.forward]
        return [self.backward] if self.is_recomputed else [self.forward, self.backward]


# Layers by key; a recorded program refers to its layer by the key alone.
LAYERS: dict[str, Layer] = {}


def partition(
    joint: GraphModule,
    own: int,
    *,
    buffers: int = 0,
    differentiable: bool = True,
    remat: bool = False,
    on_tpu: bool = False,
    is_stacked: bool = False,
    annotations: Annotations = Annotations(),  # noqa: B008  # immutable
) -> Layer:
    """The layer of a graph that computes its results and gradients.

    Args:
        joint: Graph of the layer's inputs and the hidden state's gradient. It returns the hidden
            state, the buffers, and for each input a gradient or None. It is changed.
        own: As of `Layer`.
        buffers: Number of own tensors, the last ones, that ``joint`` returns; what it returns as a
            clone was not written.
        differentiable: Whether ``joint`` has gradients; else only the results before them.
        remat: Whether backward computes the layer again, keeping its inputs alone.
        on_tpu: Whether to take rows put together of slices of others of shifted ones.
        is_stacked, annotations: As of `Layer`.
    """
    nodes = [n for n in joint.graph.nodes if n.op == "placeholder"]
    inputs = nodes[:-1] if differentiable else nodes
    made = outputs(joint)
    written = [i for i in range(buffers) if not _is_copy(made[1 + i])]
    forward_results = [made[0], *(made[1 + i] for i in written)]
    written = [1 + own - buffers + i for i in written]
    gradients = made[1 + buffers :]
    _return(joint, [*forward_results, *gradients])
    _number(joint)
    backward: GraphModule | None
    if not differentiable:
        forward, backward, kept = joint, None, []
    elif remat:
        forward = _extract(joint, inputs, forward_results)
        backward, kept = _extract(joint, nodes, gradients), list(range(len(inputs)))
    else:
        forward, backward, kept = _min_cut(joint, nodes, len(forward_results))
    # The hidden state is another in each layer, and a tensor may be written after it was read.
    kept = _keep(forward, kept, {0, *written})
    graphs = [g for g in (forward, backward) if g is not None]
    for graph in graphs if on_tpu else ():
        move_lanes(graph)
    parts = [(key_of(g), [n.meta.get("custom") for n in g.graph.nodes]) for g in graphs]
    described = (parts, own, written, kept, remat, is_stacked, annotations)
    key = hashlib.sha256(repr(described).encode()).hexdigest()
    draws = any(is_random(n) for n in joint.graph.nodes)
    layer = Layer(key, forward, backward, own, written, kept, draws, remat, is_stacked, annotations)
    LAYERS[key] = layer
    return layer


def _number(module: GraphModule) -> None:
    """Number the random draws, for backward to draw the same again."""
    draws = (n for n in module.graph.nodes if is_random(n))
    for i, node in enumerate(draws):
        node.meta[NUMBER] = i


def _extract(module: GraphModule, inputs: Sequence[Node], results: Sequence[Any]) -> GraphModule:
    """The part of a graph that makes some of its results."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op != "output" and (node.op != "placeholder" or node in inputs):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node.op == "placeholder":
            copies[node] = node  # read by what is not kept
    graph.output(tuple(copies[r] if isinstance(r, Node) else r for r in results))
    # Unlike `Graph.eliminate_dead_code`, random ops too.
    for node in reversed(list(graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users:
            graph.erase_node(node)
    return GraphModule(module, graph)


def _min_cut(
    joint: GraphModule, nodes: Sequence[Node], results: int
) -> tuple[GraphModule, GraphModule, list[int]]:
    """Forward, backward and `Layer.kept` by PyTorch's partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for i, node in enumerate(nodes, 1):  # known to the partitioner by name
        node.target = node.name = f"primals_{i}" if i < len(nodes) else "tangents_1"
    joint.recompile()
    # A view that is kept would be a copy here, one for each layer.
    with torch._functorch.config.patch(recompute_views=True):
        forward, backward = min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=results
        )
    operands = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    inputs = [n.name for n in forward.graph.nodes if n.op == "placeholder"]
    assert len(inputs) == len(nodes) - 1, "the partitioner dropped an input"
    made = outputs(forward)
    kept = {n.name: n for n in made[results:] if isinstance(n, Node)}
    wanted = [name for name in operands if name in kept]
    # Inputs are not returned: the caller has them.
    fresh = [kept[name] for name in wanted if kept[name].op != "placeholder"]
    _return(forward, [*made[:results], *fresh])
    return forward, backward, [inputs.index(n) if n in inputs else -1 for n in wanted]


def _keep(forward: GraphModule, kept: list[int], other: set[int]) -> list[int]:
    """Have forward return inputs that it must keep for each layer."""
    inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
    made = outputs(forward)
    count = sum(k < 0 for k in kept)
    tail = iter(made[len(made) - count :])
    again = [next(tail) if k < 0 else inputs[k] for k in kept if k < 0 or k in other]
    _return(forward, [*made[: len(made) - count], *again])
    return [-1 if k in other else k for k in kept]


def _return(module: GraphModule, results: Sequence[Any]) -> None:
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    output.args = (tuple(results),)
    module.recompile()


def _is_copy(result: Any) -> bool:
    return (
        isinstance(result, Node)
        and result.target is torch.ops.aten.clone.default
        and isinstance(result.args[0], Node)
        and result.args[0].op == "placeholder"
    )

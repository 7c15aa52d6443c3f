"""Equal layers as one loop: the ops ``tpu_compile::layers`` and its backward, lowered to a scan.

A layer is traced once. Its parameters come stacked, and so go their gradients; between two layers
only the activation is carried. What the backward pass needs is chosen by PyTorch's min-cut
partitioner, or is the layer's input alone (``remat``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import GraphModule

from tpu_compile.aot.annotations import constrain, scope
from tpu_compile.aot.sharding import Spec
from tpu_compile.fx_utils import lowering_of, outputs
from tpu_compile.lane_permutation import move_lanes
from tpu_compile.rng import is_random
from tpu_core.extend import find_lowering, fold_in, register, run_graph

_FORWARD = "tpu_compile.planned_layers.default"
_BACKWARD = "tpu_compile.planned_layers_backward.default"
_libraries: list[torch.library.Library] = []  # an op ends with its library
_numbers = itertools.count()


@dataclass(frozen=True)
class LayerProgram:
    """A traced layer.

    Attributes:
        key: Its name among `PROGRAMS`.
        length: Number of layers.
        forward: Of input, constants and parameters: the output and what is kept.
        backward: Of ``kept`` and the output's gradient: the gradients that are asked for.
        kept: Inputs of ``backward`` but the last: the place of an input of ``forward``, or -1 for
            the next of its further outputs.
        grads: Inputs of ``forward`` whose gradients ``backward`` returns; the layer's input first.
        constants: Number of inputs that are the same for all layers.
        is_recomputed: Whether ``backward`` runs the layer again.
        carry_spec: Partition spec of the activation.
        specs: Partition specs of the parameters, one each.
    """

    key: str
    length: int
    forward: GraphModule
    backward: GraphModule | None
    kept: tuple[int, ...]
    grads: tuple[int, ...]
    constants: int
    is_recomputed: bool
    carry_spec: Spec
    specs: tuple[Spec, ...]

    @property
    def saves_input(self) -> bool:
        return 0 in self.kept

    def flop_graphs(self) -> list[GraphModule]:
        """Graphs that together hold each product of a step once."""
        if self.backward is None:
            return [self.forward]
        return [self.backward] if self.is_recomputed else [self.forward, self.backward]


PROGRAMS: dict[str, LayerProgram] = {}


def new_key() -> str:
    """A name for a program, new in this process."""
    return f"layers{next(_numbers)}"


def scans_of(graph: GraphModule) -> list[tuple[GraphModule, int]]:
    """Graphs of the layers that a program scans, and how often each runs."""
    found = []
    for node in graph.graph.nodes:
        if str(node.target) == _FORWARD:
            program = PROGRAMS[node.args[-1]]
            found += [(g, program.length) for g in program.flop_graphs()]
    return found


class Layers(torch.autograd.Function):
    """Equal layers, one after the other.

    Inputs: the program, its seed or None, the activation, constants, stacked parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, program: LayerProgram, seed: torch.Tensor | None, x: Any, *rest: Any
    ) -> Any:
        constants, stacked = rest[: program.constants], rest[program.constants :]
        y, *saved = torch.ops.tpu_compile.planned_layers(x, constants, stacked, seed, program.key)
        ctx.program, ctx.saved = program, len(saved)
        ctx.save_for_backward(*saved, *rest, *([] if seed is None else [seed]))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        program: LayerProgram = ctx.program
        tensors = list(ctx.saved_tensors)
        saved, rest = tensors[: ctx.saved], tensors[ctx.saved :]
        count = program.constants + len(program.specs)
        seed = rest[count] if len(rest) > count else None
        constants, stacked = rest[: program.constants], rest[program.constants : count]
        made = torch.ops.tpu_compile.planned_layers_backward(
            saved, constants, stacked, grads[0].contiguous(), seed, program.key
        )
        given: list[Any] = [None] * (1 + count)
        for place, grad in zip(program.grads, made):
            given[place] = grad
        return None, None, *given


@functools.cache
def define() -> None:
    """Define the ops, what they return, and their lowerings."""
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    library.define(
        "planned_layers(Tensor x, Tensor[] constants, Tensor[] stacked, Tensor? seed, str key) "
        "-> Tensor[]"
    )
    library.define(
        "planned_layers_backward(Tensor[] saved, Tensor[] constants, Tensor[] stacked, "
        "Tensor grad, Tensor? seed, str key) -> Tensor[]"
    )
    library.impl("planned_layers", _forward_meta, "Meta")
    library.impl("planned_layers_backward", _backward_meta, "Meta")
    _libraries.append(library)
    if find_lowering(_FORWARD) is None:
        register(_FORWARD, _lower_forward)
        register(_BACKWARD, _lower_backward)


def _forward_meta(x: Any, constants: Any, stacked: Any, seed: Any, key: str) -> list[Any]:
    program = PROGRAMS[key]
    y, *fresh = _results(program.forward)
    made = [x.new_empty(y.shape, dtype=y.dtype)]
    if program.saves_input:
        made.append(x.new_empty((program.length, *x.shape)))
    return [*made, *(x.new_empty((program.length, *f.shape), dtype=f.dtype) for f in fresh)]


def _backward_meta(
    saved: Any, constants: Any, stacked: Any, grad: Any, seed: Any, key: str
) -> list[Any]:
    program = PROGRAMS[key]
    assert program.backward is not None
    made = []
    for place, g in zip(program.grads, _results(program.backward)):
        lead = (program.length,) if place > program.constants else ()
        made.append(grad.new_empty((*lead, *g.shape), dtype=g.dtype))
    return made


def _results(graph: GraphModule) -> list[torch.Tensor]:
    return [n.meta["val"] for n in outputs(graph)]


def _lower_forward(
    x: jax.Array,
    constants: Sequence[jax.Array],
    stacked: Sequence[jax.Array],
    seed: jax.Array | None,
    key: str,
) -> list[jax.Array]:
    program = PROGRAMS[key]

    def body(carry: jax.Array, layer: Any) -> Any:
        number, parameters = layer
        y, *fresh = _run(program.forward, [carry, *constants, *parameters], seed, number)
        y = constrain(y, program.carry_spec, open_rest=True)
        return y, [*([carry] if program.saves_input else []), *fresh]

    x = constrain(x, program.carry_spec, open_rest=True)
    y, saved = lax.scan(body, x, (_count(program), list(stacked)))
    return [y, *saved]


def _lower_backward(
    saved: Sequence[jax.Array],
    constants: Sequence[jax.Array],
    stacked: Sequence[jax.Array],
    grad: jax.Array,
    seed: jax.Array | None,
    key: str,
) -> list[jax.Array]:
    program = PROGRAMS[key]
    backward = program.backward
    assert backward is not None
    # Places of gradients: the input's, those of constants, those of parameters.
    shared = [p for p in program.grads if 0 < p <= program.constants]

    def body(carry: Any, layer: Any) -> Any:
        g, sums = carry
        number, own, parameters = layer
        fresh = iter(own[1:] if program.saves_input else own)
        inputs = [own[0] if program.saves_input else None, *constants, *parameters]
        values = [next(fresh) if place < 0 else inputs[place] for place in program.kept]
        made = dict(zip(program.grads, _run(backward, [*values, g], seed, number)))
        sums = [s + made[p] for s, p in zip(sums, shared)]
        weights = [
            constrain(made[p], program.specs[p - 1 - program.constants])
            for p in program.grads
            if p > program.constants
        ]
        return (constrain(made[0], program.carry_spec, open_rest=True), sums), weights

    zeros = [jnp.zeros_like(constants[p - 1]) for p in shared]
    (g, sums), weights = lax.scan(
        body, (grad, zeros), (_count(program), list(saved), list(stacked)), reverse=True
    )
    return [g, *sums, *weights]


def _count(program: LayerProgram) -> jax.Array:
    return jnp.arange(program.length, dtype=jnp.uint32)


def _run(
    graph: GraphModule, inputs: Sequence[Any], seed: jax.Array | None, number: jax.Array
) -> list[Any]:
    key = None if seed is None else fold_in(seed.astype(jnp.uint32), number)
    return run_graph(graph, inputs, key, entry_of=lowering_of, scope=scope)


def draws(graph: GraphModule) -> bool:
    """Return whether a graph draws random numbers."""
    return any(map(is_random, graph.graph.nodes))


def partition(joint: GraphModule, inputs: int) -> tuple[GraphModule, GraphModule, tuple[int, ...]]:
    """Divide a graph of output and gradients into a forward and a backward part.

    Args:
        joint: Returns the output, then gradients; its last input is the output's gradient.
        inputs: Number of the other inputs.

    Returns:
        Both parts, and `LayerProgram.kept`.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(placeholders):
        node.target = node.name = f"primals_{i + 1}" if i < inputs else "tangents_1"
    joint.recompile()
    examples = [n.meta["val"] for n in placeholders]
    # A view that is kept would be a copy here, one for each layer.
    with torch._functorch.config.patch(recompute_views=True):
        forward, backward = min_cut_rematerialization_partition(
            joint, (examples[:inputs], examples[inputs:]), num_fwd_outputs=1
        )
    place = {f"primals_{i + 1}": i for i in range(inputs)}
    (output,) = [n for n in forward.graph.nodes if n.op == "output"]
    y, *saved = output.args[0]
    kept = {str(n.name): place.get(str(n.target), -1) for n in saved}
    # What is an input is not returned: the caller has it.
    output.args = ([y, *(n for n in saved if kept[n.name] < 0)],)
    _take_all(forward, [f"primals_{i + 1}" for i in range(inputs)], examples)
    order = [str(n.name) for n in backward.graph.nodes if n.op == "placeholder"][:-1]
    fresh = [str(n.name) for n in saved if kept[n.name] < 0]
    assert [n for n in order if kept[n] < 0] == fresh, "the parts disagree on what is kept"
    for part in (forward, backward):
        move_lanes(part)
    return forward, backward, tuple(kept[name] for name in order)


def _take_all(graph: GraphModule, names: Sequence[str], examples: Sequence[Any]) -> None:
    """Give a graph all inputs, in order, where the partitioner dropped those it does not use."""
    before = {str(n.target): n for n in graph.graph.nodes if n.op == "placeholder"}
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        for name, example in zip(names, examples):
            node = graph.graph.placeholder(f"{name}_")
            node.meta["val"] = example
            if name in before:
                before[name].replace_all_uses_with(node)
    for node in before.values():
        graph.graph.erase_node(node)
    graph.recompile()

"""One layer of a stack as two graphs, and the ops that run them for all layers.

The ops are ``tpu_compile::layers_forward`` and ``tpu_compile::layers_backward``. Their lowerings
are one loop each over stacked parameters, so that programs do not grow with the stack.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch._guards import tracing
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from tpu_compile.evaluate import call
from tpu_compile.fx_utils import outputs
from tpu_compile.graphs import decompositions
from tpu_compile.identity import identities
from tpu_compile.keys import key_of
from tpu_compile.rng import NUMBER, Derived, Draws, Words, is_random
from tpu_compile.sizes import Sizes
from tpu_core.extend import BodyChecks, fold_in, hide_lines_of, register, register_checked_op

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is ready to be looped.

    Its inputs are the hidden state, its parameters, its buffers and the stack's other arguments.

    Attributes:
        key: Hash of what it computes, the same in every process.
        forward: Graph of the inputs; it returns the hidden state, the buffers, and what is kept.
        backward: Graph of what is kept and the hidden state's gradient; it returns the inputs'
            gradients, or None for one.
        counts: Number of parameters, buffers and other arguments.
        written: Positions of the buffers that it writes.
        kept: Operands of ``backward``: an input's position, or -1 for a result of ``forward``.
        draws: Whether it draws random numbers.
    """

    key: str
    forward: GraphModule
    backward: GraphModule | None
    counts: tuple[int, int, int]
    written: list[int]
    kept: list[int]
    draws: bool

    def made(self) -> list[Tensor]:
        """Metadata of the results of ``forward`` that are kept."""
        return [_meta_of(n) for n in outputs(self.forward)[1 + self.counts[1] :]]

    def grouped(self) -> tuple[list[int], list[int]]:
        """Indices of inputs with a gradient: parameters by input, other arguments by their own
        position.
        """
        assert self.backward is not None
        first, last = 1 + self.counts[0], 1 + sum(self.counts[:2])
        graded = [i for i, g in enumerate(outputs(self.backward)) if g is not None]
        return [i for i in graded if 0 < i < first], [i - last for i in graded if i >= last]


# Layers by key; a recorded program refers to its layer by the key alone.
LAYERS: dict[str, Layer] = {}


def trace(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    counts: tuple[int, int, int],
    differentiable: bool,
    remat: bool,
) -> Layer:
    """The graphs of a layer.

    Args:
        run: The layer, as a function of the inputs; it may write buffers.
        inputs: Tensors like those that it will get, as `Layer` has them.
        counts: As of `Layer`.
        differentiable: Whether a gradient is wanted.
        remat: Whether backward computes the layer again, keeping its inputs alone.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple

    first, last = 1 + counts[0], 1 + counts[0] + counts[1]

    def pure(*values: Tensor) -> tuple[Tensor, ...]:
        buffers = [v.clone() for v in values[first:last]]
        return run(*values[:first], *buffers, *values[last:]), *buffers

    with _disable_current_modes(), tracing(None), torch.enable_grad():
        joint: Any = aot_export_joint_simple(
            pure, tuple(inputs), trace_joint=differentiable, decompositions=decompositions()
        )
    _number(joint)
    made, results = outputs(joint), 1 + counts[1]
    nodes = [n for n in joint.graph.nodes if n.op == "placeholder"]
    primals = nodes[: len(inputs)]
    if not differentiable:
        forward, backward, kept = joint, None, []
    elif remat:
        forward = _extract(joint, primals, made[:results])
        backward, kept = _extract(joint, nodes, made[results:]), list(range(len(inputs)))
    else:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        forward, backward = min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=results
        )
        kept = _order(forward, backward, results)
    # The hidden state is another in each layer, and a buffer may be written after it was read.
    written = [i for i in range(counts[1]) if not _is_copy(outputs(forward)[1 + i])]
    other = {0, *(first + i for i in written)}
    kept = _keep(forward, kept, other)
    parts = [key_of(g) for g in (forward, backward) if g is not None]
    key = hashlib.sha256(repr((parts, counts, written, kept)).encode()).hexdigest()
    draws = any(is_random(n) for n in joint.graph.nodes)
    layer = Layer(key, forward, backward, counts, written, kept, draws)
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
    _drop_unused(graph)
    return GraphModule(module, graph)


def _drop_unused(graph: Graph) -> None:
    # Unlike `Graph.eliminate_dead_code`, random ops too.
    for node in reversed(list(graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users:
            graph.erase_node(node)


def _order(forward: GraphModule, backward: GraphModule, results: int) -> list[int]:
    """Inputs of backward, in its order; forward's results are brought into the same."""
    names = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    inputs = [n.name for n in forward.graph.nodes if n.op == "placeholder"]
    made = outputs(forward)
    kept = {n.name: n for n in made[results:] if isinstance(n, Node)}
    wanted = [name for name in names if name in kept]
    ours = [kept[name] for name in wanted if kept[name].op != "placeholder"]
    _return(forward, [*made[:results], *ours])
    return [inputs.index(name) if name in inputs else -1 for name in wanted]


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


def _meta_of(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


@functools.cache
def define() -> None:
    """Define the two ops; a second call does nothing."""
    hide_lines_of(__file__)
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    stack = "Tensor x, Tensor[] params, Tensor[] buffers, Tensor[] others, Tensor? key"
    library.define(f"layers_forward({stack}, str layer, int count) -> Tensor[]")
    library.define(f"layers_backward({stack}, Tensor[] made, str layer, int count) -> Tensor[]")
    library.impl("layers_forward", _forward_meta, "Meta")
    library.impl("layers_backward", _backward_meta, "Meta")
    _libraries.append(library)
    register("tpu_compile.layers_forward.default", _forward, identity=_identity)
    register("tpu_compile.layers_backward.default", _backward, identity=_identity)
    register_checked_op("tpu_compile.layers_forward.default")


_libraries: list[torch.library.Library] = []  # an op ends with its library


def _identity(*arguments: Any) -> str:
    """Of those of a layer's ops that have one: its key knows them by name."""
    program, sizes = LAYERS[arguments[-2]], Sizes({})
    graphs = (g for g in (program.forward, program.backward) if g is not None)
    return " ".join(text for g in graphs for text in identities(g, sizes))


def _empty(like: Tensor, *lead: int) -> Tensor:
    shape = (*lead, *like.shape)
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _meta_of_joined(like: Tensor, count: int) -> Tensor:
    """One layer after the other along the first dim; numbers become a vector."""
    first, *rest = like.shape or (1,)
    return torch.empty((count * first, *rest), dtype=like.dtype, device="meta")


def _forward_meta(
    x: Tensor, params: Any, buffers: Any, others: Any, key: Any, layer: str, count: int
) -> list[Tensor]:
    program = LAYERS[layer]
    each = [buffers[k + i * program.counts[1]] for k in program.written for i in range(count)]
    kept = [_empty(m, count) for m in program.made()]
    return [_empty(x), *map(_empty, each), *kept]


def _backward_meta(
    grad: Tensor,
    params: list[Tensor],
    buffers: list[Tensor],
    others: list[Tensor],
    key: Any,
    made: Any,
    layer: str,
    count: int,
) -> list[Tensor]:
    program = LAYERS[layer]
    own, shared = program.grouped()
    stacked = [_meta_of_joined(params[k - 1], count) for k in own]
    return [_empty(grad), *stacked, *(_empty(others[k]) for k in shared)]


def _stack(arrays: Sequence[jax.Array], each: int) -> list[jax.Array]:
    """Arrays of one layer after the other as one array for each place in a layer."""
    return [_join(arrays[i::each]) for i in range(each)]


def _join(arrays: Sequence[jax.Array]) -> jax.Array:
    if not arrays[0].ndim:
        return jnp.stack(arrays)
    # One op, where stacking would be one for each array.
    joined = lax.concatenate(list(arrays), 0)
    return joined.reshape(len(arrays), *arrays[0].shape)


def _part(stacked: jax.Array) -> list[jax.Array]:
    """The reverse of `_join`."""
    if stacked.ndim == 1:
        return [stacked[i] for i in range(stacked.shape[0])]
    flat = stacked.reshape(-1, *stacked.shape[2:])
    return list(lax.split(flat, [stacked.shape[1]] * stacked.shape[0], 0))


def _draws(key: jax.Array | None, round_: Any) -> Draws:
    return Words(()) if key is None else Derived(fold_in(key.astype(np.uint32), round_))


def _forward(
    x: jax.Array,
    params: list[jax.Array],
    buffers: list[jax.Array],
    others: list[jax.Array],
    key: jax.Array | None,
    layer: str,
    count: int,
) -> list[jax.Array]:
    program = LAYERS[layer]
    of_params, of_buffers, _ = program.counts
    sizes = Sizes({})

    checks = BodyChecks()

    def step(carry: Any, item: Any) -> Any:
        word, hidden = carry
        round_, own, state = item
        arguments = [hidden, *own, *state, *others]
        word, found = checks.run(
            word, lambda: call(program.forward, arguments, sizes, _draws(key, round_))
        )
        new = [found[1 + i] for i in program.written]
        return (word, found[0]), [*new, *found[1 + of_buffers :]]

    stacks = _stack(params, of_params), _stack(buffers, of_buffers)
    rounds = jnp.arange(count, dtype=np.uint32)
    (word, last), results = lax.scan(step, (checks.start(), x), (rounds, *stacks))
    checks.report(word)
    written = len(program.written)
    return [last, *(a for r in results[:written] for a in _part(r)), *results[written:]]


def _backward(
    grad: jax.Array,
    params: list[jax.Array],
    buffers: list[jax.Array],
    others: list[jax.Array],
    key: jax.Array | None,
    made: list[jax.Array],
    layer: str,
    count: int,
) -> list[jax.Array]:
    program = LAYERS[layer]
    assert program.backward is not None
    backward = program.backward
    of_params, of_buffers, _ = program.counts
    own, shared = program.grouped()
    last = 1 + of_params + of_buffers
    sizes = Sizes({})

    def step(carry: Any, item: Any) -> Any:
        gradient, totals = carry
        round_, weights, state, kept = item
        inputs = [None, *weights, *state, *others]
        each = iter(kept)
        arguments = [next(each) if k < 0 else inputs[k] for k in program.kept]
        found = call(backward, [*arguments, gradient], sizes, _draws(key, round_))
        totals = [t + found[last + k] for t, k in zip(totals, shared)]
        before = jnp.zeros_like(gradient) if found[0] is None else found[0]
        return (before, totals), [found[k] for k in own]

    stacks = _stack(params, of_params), _stack(buffers, of_buffers)
    rounds = jnp.arange(count, dtype=np.uint32)
    start = grad, [jnp.zeros_like(others[k]) for k in shared]
    (gradient, totals), grads = lax.scan(step, start, (rounds, *stacks, made), reverse=True)
    joined = [g.reshape(-1, *g.shape[2:]) for g in grads]
    return [gradient, *joined, *totals]

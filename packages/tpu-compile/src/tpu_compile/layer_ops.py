"""The ops that run a traced layer for all layers of a stack, and their gradient.

The ops are ``tpu_compile::layers_forward`` and ``tpu_compile::layers_backward``. Their lowerings
are one loop each over stacked tensors, so that programs do not grow with the stack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from tpu_compile.evaluate import call
from tpu_compile.layers import LAYERS, Layer
from tpu_compile.op_digests import op_digests
from tpu_compile.rng import Derived, Draws, Words
from tpu_compile.sharding_constraints import constrain
from tpu_compile.sizes import Sizes
from tpu_core.extend import BodyChecks, GraphEvaluator, RandomKey, hide_lines_of, register

Tensor = torch.Tensor

_FORWARD = "tpu_compile.layers_forward.default"
_BACKWARD = "tpu_compile.layers_backward.default"
_libraries: list[torch.library.Library] = []  # an op ends with its library


@functools.cache
def define() -> None:
    """Define the two ops; a second call does nothing."""
    hide_lines_of(__file__)
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    rest = "Tensor[] own, Tensor[] shared, Tensor? key, str layer, int count"
    library.define(f"layers_forward(Tensor x, {rest}) -> Tensor[]")
    library.define(f"layers_backward(Tensor grad, Tensor[] made, {rest}) -> Tensor[]")
    library.impl("layers_forward", _forward_meta, "Meta")
    library.impl("layers_backward", _backward_meta, "Meta")
    _libraries.append(library)
    register(_FORWARD, _forward, identity=_identity)
    register(_BACKWARD, _backward, identity=_identity)
    BodyChecks.declare(_FORWARD)


def loops_of(module: GraphModule) -> list[tuple[Layer, int]]:
    """Layers that a graph loops over in its forward pass, and how many of each."""
    nodes = (n for n in module.graph.nodes if str(n.target) == _FORWARD)
    return [(LAYERS[str(n.args[-2])], int(n.args[-1])) for n in nodes]


class LayerStack(torch.autograd.Function):
    """Equal layers, one after the other, with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, count: int, key: Tensor | None, x: Tensor, *rest: Tensor
    ) -> Any:
        """The last hidden state, and for each input that layers write its new values, stacked.

        Args:
            ctx: The context.
            layer: The layer.
            count: Number of layers.
            key: Two words, if it draws random numbers.
            x: The first hidden state.
            rest: Own tensors, all of a layer before those of the next, see `Layer.is_stacked`; then
                the shared ones.
        """
        owned = layer.own * (1 if layer.is_stacked else count)
        own, shared = rest[:owned], rest[owned:]
        result = torch.ops.tpu_compile.layers_forward(x, own, shared, key, layer.key, count)
        results, made = result[: 1 + len(layer.written)], result[1 + len(layer.written) :]
        # A tensor that layers write is among what the loop made; autograd would refuse it.
        read, among = layer.read()
        kept = [t for i, t in enumerate(own) if 1 + i % layer.own in read]
        kept += [shared[k - layer.own - 1] for k in among]
        ctx.layer, ctx.count, ctx.key, ctx.owned, ctx.inputs = layer, count, key, owned, len(rest)
        ctx.save_for_backward(*made, *kept)
        ctx.lengths = len(made), len(kept) - len(among)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        """Gradients of the inputs of `forward`; those of own tensors share memory."""
        layer, saved = ctx.layer, ctx.saved_tensors
        made, kept = saved[: ctx.lengths[0]], saved[ctx.lengths[0] :]
        found = torch.ops.tpu_compile.layers_backward(
            grad.contiguous(),
            made,
            kept[: ctx.lengths[1]],
            kept[ctx.lengths[1] :],
            ctx.key,
            layer.key,
            ctx.count,
        )
        grads: list[Tensor | None] = [None] * ctx.inputs
        own, shared = layer.graded()
        # Views: a copy for each layer would be a kernel for each.
        for k, like, whole in zip(own, layer.gradients(own), found[1:]):
            if layer.is_stacked:
                parts = (whole,)
            else:
                parts = whole.split(like.shape[0]) if _is_joined(layer, like) else whole.unbind()
            grads[k - 1 : ctx.owned : layer.own] = parts
        for k, gradient in zip(shared, found[1 + len(own) :]):
            grads[ctx.owned + k - layer.own - 1] = gradient
        return None, None, None, found[0], *grads


def _identity(*arguments: Any) -> str:
    """Of those of a layer's ops that have one: its key knows them by name."""
    layer, sizes = LAYERS[arguments[-2]], Sizes({})
    graphs = (g for g in (layer.forward, layer.backward) if g is not None)
    return " ".join(text for g in graphs for text in op_digests(g, sizes))


def _empty(like: Tensor, *lead: int) -> Tensor:
    return torch.empty((*lead, *like.shape), dtype=like.dtype, device="meta")


def _is_joined(layer: Layer, like: Any) -> bool:
    """Return whether gradients of all layers like this one are joined along its first dim.

    A layer's part is a slice of the whole then, with nothing to reshape.
    """
    return not layer.is_stacked and like.ndim > 0 and like.shape[0] > 0


def _forward_meta(
    x: Tensor, own: Any, shared: Any, key: Any, layer: str, count: int
) -> list[Tensor]:
    return [_empty(x), *(_empty(m, count) for m in LAYERS[layer].made())]


def _backward_meta(
    grad: Tensor, made: Any, own: Any, shared: Any, key: Any, layer: str, count: int
) -> list[Tensor]:
    program = LAYERS[layer]
    each, summed = map(program.gradients, program.graded())
    own = [
        _empty(g, count).flatten(0, 1) if _is_joined(program, g) else _empty(g, count) for g in each
    ]
    return [_empty(grad), *own, *map(_empty, summed)]


class _Loop:
    """Rounds of a loop over layers.

    Args:
        key: Of the op's call, if it draws random numbers.
        layer: The layer.
        count: Number of rounds.
    """

    def __init__(self, key: jax.Array | None, layer: Layer, count: int) -> None:
        self._key, self._layer, self._count = key, layer, count
        self.rounds = jnp.arange(count, dtype=np.uint32)

    def stacked(self, own: Sequence[jax.Array]) -> list[jax.Array]:
        """Own tensors as one for all layers, each."""
        if self._layer.is_stacked:
            return list(own)
        each = len(own) // self._count
        return [_join(own[i::each]) for i in range(each)]

    def run(self, graph: GraphModule, arguments: Sequence[Any], round_: jax.Array) -> Any:
        """Results of one of the layer's graphs."""
        draws: Draws = Words(())
        if self._key is not None:
            draws = Derived(RandomKey.fold_in(self._key.astype(np.uint32), round_))
        return call(graph, arguments, Sizes({}), draws, self._layer.annotations.label)


def _join(arrays: Sequence[jax.Array]) -> jax.Array:
    if not arrays[0].ndim:
        return jnp.stack(arrays)
    # One op, where stacking would be one for each array.
    joined = lax.concatenate(list(arrays), 0)
    return joined.reshape(len(arrays), *arrays[0].shape)


def _forward(
    x: jax.Array,
    own: list[jax.Array],
    shared: list[jax.Array],
    key: jax.Array | None,
    layer: str,
    count: int,
) -> list[jax.Array]:
    program, checks = LAYERS[layer], BodyChecks()
    loop, spec = _Loop(key, program, count), program.annotations.carry

    def step(carry: Any, item: Any) -> Any:
        word, hidden = carry
        round_, tensors = item
        arguments = [hidden, *tensors, *shared]
        word, (last, *rest) = checks.run(word, lambda: loop.run(program.forward, arguments, round_))
        return (word, constrain(last, spec, open_rest=True)), rest

    start = checks.start(), constrain(x, spec, open_rest=True)
    (word, last), results = lax.scan(step, start, (loop.rounds, loop.stacked(own)))
    checks.report(word)
    return [last, *results]


def _backward(
    grad: jax.Array,
    made: list[jax.Array],
    own: list[jax.Array],
    shared: list[jax.Array],
    key: jax.Array | None,
    layer: str,
    count: int,
) -> list[jax.Array]:
    program = LAYERS[layer]
    assert program.backward is not None
    backward, loop = program.backward, _Loop(key, program, count)
    read, among = program.read()
    each, summed = program.graded()
    specs = program.annotations.own

    def step(carry: Any, item: Any) -> Any:
        gradient, totals = carry
        round_, tensors, kept = item
        inputs = dict(zip((*read, *among), (*tensors, *shared)))
        fresh = iter(kept)
        arguments = [next(fresh) if k < 0 else inputs[k] for k in program.kept]
        found = loop.run(backward, [*arguments, gradient], round_)
        totals = [t + found[k] for t, k in zip(totals, summed)]
        before = jnp.zeros_like(gradient) if found[0] is None else found[0]
        before = constrain(before, program.annotations.carry, open_rest=True)
        grads = [constrain(found[k], specs[k - 1] if specs else None) for k in each]
        return (before, totals), grads

    zeros = [jnp.zeros(a.shape, a.dtype) for a in GraphEvaluator.avals(program.gradients(summed))]
    items = loop.rounds, loop.stacked(own), made
    (gradient, totals), grads = lax.scan(step, (grad, zeros), items, reverse=True)
    joined = (
        g.reshape(-1, *g.shape[2:]) if _is_joined(program, like) else g
        for g, like in zip(grads, program.gradients(each))
    )
    return [gradient, *joined, *totals]

"""PyTorch's higher-order ops as StableHLO's control flow.

A lowering takes a `HigherOrderCall` and the op's arguments, graphs among them; it returns what the
op does. Bodies are evaluated by the same evaluator as the graph around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import GraphModule, Node

from tpu_compile import flex_attention
from tpu_compile.rng import Derived, Draws, is_random
from tpu_compile.sizes import Sizes
from tpu_core.extend import BodyChecks, RandomKey

_HOPS = torch.ops.higher_order

Results = tuple[Any, ...]
# Of a loop: round, values, kept values, word of checks, whether there is another round; the last is
# None where the condition is evaluated between the rounds.
_State = tuple[Any, Results, Results, Any, Any]


class Evaluator(Protocol):
    """`tpu_compile.evaluate.call`."""

    def __call__(
        self, module: GraphModule, arguments: Sequence[Any], sizes: Sizes, draws: Draws
    ) -> Results: ...


class HigherOrderCall:
    """One call of a higher-order op.

    Args:
        node: The call.
        evaluator: Evaluates its graphs.
        sizes: Values of the symbols known outside.
        draws: Gives the key of a call that draws random numbers.
    """

    def __init__(self, node: Node, evaluator: Evaluator, sizes: Sizes, draws: Draws) -> None:
        self.node, self.sizes, self.draws = node, sizes, draws
        self._evaluator = evaluator

    def key(self) -> jax.Array | None:
        """The key of the call, if it draws random numbers."""
        return self.draws.key(self.node) if is_random(self.node) else None

    def run(
        self, module: GraphModule, arguments: Sequence[Any], key: jax.Array | None, round_: Any = 0
    ) -> Results:
        """The results of a graph, as arrays.

        Args:
            module: The graph.
            arguments: Its inputs.
            key: Of the call.
            round_: Number of the round of a loop: each draws other numbers.
        """
        draws = self.draws if key is None else Derived(RandomKey.fold_in(key, round_))
        return self.inline(module, arguments, draws)

    def inline(self, module: GraphModule, arguments: Sequence[Any], draws: Draws) -> Results:
        """The results of a graph whose draws are those of the graph around it."""
        inputs = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
        results = self._evaluator(module, arguments, self.sizes.inside(inputs, arguments), draws)
        return tuple(_as_array(r) for r in results)


def _as_array(value: Any) -> Any:
    """Numbers as what loops can carry; None stays."""
    return jnp.asarray(np.asarray(value)) if isinstance(value, (bool, int, float)) else value


def _truth(value: Any) -> Any:
    return jnp.reshape(value, ()).astype(np.bool_)


def _cond(
    call: HigherOrderCall,
    pred: Any,
    if_true: GraphModule,
    if_false: GraphModule,
    operands: Sequence[Any],
) -> Results:
    key = call.key()
    if isinstance(pred, (bool, int)):
        return call.run(if_true if pred else if_false, operands, key)
    checks = BodyChecks()
    word = checks.start()
    word, result = lax.cond(
        _truth(pred),
        lambda: checks.run(word, lambda: call.run(if_true, operands, key)),
        lambda: checks.run(word, lambda: call.run(if_false, operands, key), 1),
    )
    checks.report(word)
    found: Results = result
    return found


def _while_loop(
    call: HigherOrderCall,
    test: GraphModule,
    body: GraphModule,
    carried: Sequence[Any],
    others: Sequence[Any] = (),
) -> Results:
    return _rounds(call, test, body, tuple(map(_as_array, carried)), others)[1]


def _rounds(
    call: HigherOrderCall,
    test: GraphModule,
    body: GraphModule,
    start: Results,
    others: Sequence[Any],
    kept: Results = (),
) -> tuple[Any, Results, Results]:
    """Number of rounds, what they carry at the end, and ``kept`` with what each round carried."""
    key, checks = call.key(), BodyChecks()

    def again(values: Results, number: Any) -> Any:
        (truth,) = call.run(test, (*values, *others), key, number)
        return _truth(truth)

    def checked(word: Any, values: Results, number: Any) -> tuple[Any, Any]:
        if not carries:
            return word, None
        word, truth = checks.run(word, lambda: again(values, number), 1)
        # A condition that reads out of range might hold for ever.
        return word, truth if word is None else truth & (word[0] == 0)

    def step(state: _State) -> _State:
        number, values, kept, word, _ = state
        word, results = checks.run(word, lambda: call.run(body, (*values, *others), key, number))
        results = tuple(r.astype(x.dtype) for r, x in zip(results, start, strict=True))
        kept = tuple(k.at[number].set(r, mode="drop") for k, r in zip(kept, results))
        return number + 1, results, kept, *checked(word, results, number + 1)

    first = np.uint32(0)
    # XLA takes nothing but the truth from a condition: one with checks is part of the round before.
    carries = checks.has_any(lambda: again(start, first))
    number, values, kept, word, _ = lax.while_loop(
        lambda state: state[4] if carries else again(state[1], state[0]),
        step,
        (first, start, kept, *checked(checks.start(), start, first)),
    )
    checks.report(word)
    return number, values, kept


def _scan(
    call: HigherOrderCall,
    combine: GraphModule,
    init: Sequence[Any],
    xs: Sequence[Any],
    others: Sequence[Any] = (),
) -> Results:
    key, count, checks = call.key(), len(init), BodyChecks()

    def step(state: Any, item: tuple[Any, Results]) -> Any:
        word, carry = state
        word, results = checks.run(
            word, lambda: call.run(combine, (*carry, *item[1], *others), key, item[0])
        )
        return (word, results[:count]), results[count:]

    rounds = jnp.arange(xs[0].shape[0], dtype=np.uint32)
    start = checks.start(), tuple(map(_as_array, init))
    (word, carry), ys = lax.scan(step, start, (rounds, tuple(xs)))
    checks.report(word)
    return *carry, *ys


def _map(
    call: HigherOrderCall, body: GraphModule, xs: Sequence[Any], others: Sequence[Any] = ()
) -> Results:
    return _scan(call, body, (), xs, others)


def _associative_scan(
    call: HigherOrderCall, combine: GraphModule, xs: Sequence[Any], others: Sequence[Any] = ()
) -> Results:
    key = call.key()

    def pair(left: Results, right: Results) -> Results:
        run: Callable[..., Results] = jax.vmap(
            lambda *both: call.run(combine, (*both, *others), key), in_axes=0
        )
        return run(*left, *right)

    return tuple(lax.associative_scan(pair, tuple(xs)))


def _invoke_subgraph(
    call: HigherOrderCall, body: GraphModule, name: str, *operands: Any
) -> Results:
    return call.inline(body, operands, call.draws)


STACKS = _HOPS.while_loop_stack_output


def _stacked_while_loop(
    call: HigherOrderCall,
    test: GraphModule,
    body: GraphModule,
    carried: Sequence[Any],
    others: Sequence[Any] = (),
) -> Results:
    """Values carried after each iteration, in arrays with room for some, and their number.

    Of a loop without rounds PyTorch keeps what it began with.
    """
    start = tuple(map(_as_array, carried))
    *room, _ = call.node.meta["val"]
    kept = tuple(
        jnp.zeros((r.shape[0], *x.shape), x.dtype).at[0].set(x)
        for r, x in zip(room, start, strict=True)
    )
    number, _, kept = _rounds(call, test, body, start, others, kept)
    return *kept, jnp.maximum(number, 1).astype(np.int64)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    _HOPS.cond: _cond,
    _HOPS.while_loop: _while_loop,
    STACKS: _stacked_while_loop,
    _HOPS.scan: _scan,
    _HOPS.map_impl: _map,
    _HOPS.associative_scan: _associative_scan,
    _HOPS.invoke_subgraph: _invoke_subgraph,
    _HOPS.flex_attention: flex_attention.flex_attention,
    _HOPS.flex_attention_backward: flex_attention.flex_attention_backward,
}


def can_be_lowered(node: Node) -> bool:
    """Return whether a higher-order op has a lowering; that of its bodies' ops is another
    question.
    """
    # What draws random numbers for each score has no numbers in PyTorch's eager either.
    scores = (_HOPS.flex_attention, _HOPS.flex_attention_backward)
    return node.target in LOWERINGS and not (node.target in scores and is_random(node))

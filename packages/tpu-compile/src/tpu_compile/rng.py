"""Random numbers of compiled graphs: the key of each draw.

A random op of the graph itself takes the generator's next words, as it would in eager. Ops in the
body of a loop or branch share the words of that loop or branch, since how often they run is not
known before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import lowering_of, subgraphs
from tpu_core.extend import RandomKey

_MASK = 0xFFFFFFFF
WORDS = 4
"""Words that a draw takes."""


class Draws(Protocol):
    """Gives the keys of random ops, in the graph's order."""

    def key(self, node: Node) -> jax.Array:
        """The ``uint32[2]`` key of a random op; each is asked for once, in order."""
        ...


def as_scalars(words: Iterable[int]) -> list[int]:
    """Words of 32 bits as ``Scalar[]`` of an op: numbers that differ and are neither 0 nor 1.

    Those would be taken for constants of the program, to be compiled again once they vary. The
    lowering takes the low 32 bits.
    """
    return [word | (i + 1) << 32 for i, word in enumerate(words)]


class Words:
    """Keys from four words each.

    Args:
        words: Words of seeds and offsets, one after the other.
    """

    def __init__(self, words: Iterable[Any]) -> None:
        self._words = iter(words)

    def key(self, _: Node) -> jax.Array:
        """The key of the next four words."""
        words = (jnp.asarray(next(self._words)).astype(jnp.uint32) for _ in range(WORDS))
        return RandomKey.derive(*words)


class Derived:
    """Keys of a body's random ops, from the one of the loop or branch.

    Args:
        key: Of one round.
    """

    def __init__(self, key: jax.Array) -> None:
        self._key, self._count = key, 0

    def key(self, node: Node) -> jax.Array:
        """An independent key for each number, or for each call where nodes have none."""
        self._count += 1
        return RandomKey.fold_in(self._key, node.meta.get(NUMBER, self._count - 1))


def is_random(node: Node) -> bool:
    """Return whether the node draws random numbers; the body of a loop or branch may."""
    if node.op != "call_function":
        return False
    entry = lowering_of(node.target)
    if entry is not None:
        return entry.draws(node.args, node.kwargs)
    return any(map(_draws, subgraphs(node)))


def _draws(module: GraphModule) -> bool:
    return any(map(is_random, module.graph.nodes))


def drawing(module: GraphModule) -> list[Node]:
    """The nodes of a graph that take words; those of a graph that is called in place are its own.

    A graph that is called twice is named twice.
    """
    found: list[Node] = []
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.invoke_subgraph:
            found += (n for inner in subgraphs(node) for n in drawing(inner))
        elif is_random(node):
            found.append(node)
    return found


class Seeds:
    """The words that a graph's draws take in one call.

    Args:
        module: The graph.
    """

    def __init__(self, module: GraphModule) -> None:
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._nodes = drawing(module)
        states = (n.meta.get(STATE) for n in self._nodes)
        self._given = [None if state is None else inputs.index(state) for state in states]

    def __len__(self) -> int:
        return len(self._nodes)

    def words(self, device: torch.device, arguments: Sequence[Any]) -> list[tuple[int, ...]]:
        """Four words a draw.

        Args:
            device: Device of the generator that advances.
            arguments: Of the graph; random states to draw from again are among them.
        """
        found: list[tuple[int, ...]] = []
        for given in self._given:
            if given is None:
                ((seed, offset),) = RandomKey.seeds(device.index, 1)
            else:
                seed, offset = arguments[given].view(torch.int64).tolist()
            found.append((seed & _MASK, seed >> 32 & _MASK, offset & _MASK, offset >> 32 & _MASK))
        return found

    def state(self, node: Node, words: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The random state that a draw took: 16 bytes on the CPU, seed then offset.

        Args:
            node: Makes the state, see `tpu_compile.random_states`.
            words: Of this call.
        """
        drawn: Any = node.args[0]
        if drawn not in self._nodes:  # a chance of 0: neither this call nor its repetition draws
            return vars(torch)["tpu"].get_rng_state()
        taken = words[self._nodes.index(drawn)]
        return (
            torch.tensor(taken, dtype=torch.int64, device="cpu").to(torch.uint32).view(torch.uint8)
        )


NUMBER = "tpu_draw"
"""Key of a node's metadata: number of its draw, where another graph is to draw the same."""

STATE = "tpu_random_state"
"""Key of a node's metadata: the input that is the random state it draws from."""

"""How the operands of kernels come to be divided, as Shardy decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tpu_core.lowering.operand_sharding import OperandSharding
from tpu_core.pjrt.chips import AbstractChip

MESH = AbstractChip().mesh({"data": 4, "model": 2})


def learned(f: Callable[..., Any], **specs: tuple[str | None, ...]) -> OperandSharding:
    """What is learned of ``f(division, x, w)``."""
    division = OperandSharding(MESH)
    arguments = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(MESH, PartitionSpec(*spec)))
        for shape, spec in [((8, 6, 32), specs["x"]), ((3, 32, 32), specs["w"])]
    ]
    lowered = jax.jit(lambda x, w: f(division, x, w)).trace(*arguments)
    assert not division.is_known
    division.learn(lowered.lower(lowering_platforms=("tpu",)))
    assert division.is_known
    return division


def test_operands_in_a_loop_are_divided_as_the_parameters_have_it() -> None:
    def f(division: OperandSharding, x: jax.Array, w: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            heads = (x @ w).reshape(8, 6, 4, 8).transpose(0, 2, 1, 3)
            heads, x = division.probe("heads", (heads, x))
            return x + jnp.tanh(heads).transpose(0, 2, 1, 3).reshape(8, 6, 32), None

        return jax.lax.scan(layer, x, w)[0]

    division = learned(f, x=("data",), w=(None, None, "model"))
    assert division.is_needed
    found = division.axes("heads")
    assert found is not None
    assert found[0] == [("data",), ("model",), (), ()]
    assert found[1][0] == ("data",)


def test_what_is_not_divided_or_not_marked() -> None:
    def f(division: OperandSharding, x: jax.Array, w: jax.Array) -> jax.Array:
        (x,) = division.probe("x", [x])
        return x * 2

    division = learned(f, x=(), w=("data",))
    assert division.axes("x") == [[(), (), ()]]
    assert division.axes("y") is None
    assert not OperandSharding(MESH).is_needed

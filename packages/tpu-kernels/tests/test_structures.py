"""Calls with pytrees, whose layout is remembered, are bound as the first of them is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpu_kernels import JaxOp, jax_op

_numbers = itertools.count()


def make(fn: Callable[..., Any], **options: Any) -> JaxOp:
    return jax_op(f"test_structures::op{next(_numbers)}", fn, **options)


def blended(
    p: dict[str, Any],
    *rest: jax.Array,
    scale: int = 2,
    mode: Any = ("sum", 1),
    bias: jax.Array | None = None,
) -> dict[str, Any]:
    total = sum(jax.tree.leaves(p)) * scale
    for r in rest:
        total = total + r
    total = total if bias is None else total + bias
    return {mode[0]: total * mode[1], "n": [total] * scale}


def plain(value: Any) -> Any:
    return jax.tree.map(lambda t: t.tolist(), value)


def test_calls_of_many_forms_each_time_anew() -> None:
    op = make(blended, static=("mode",))
    x, y = torch.ones(2, device="tpu"), torch.full((2,), 3.0, device="tpu")
    jx, jy = jnp.ones(2), jnp.full((2,), 3.0)
    calls: list[Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = [
        lambda x, y: (({"a": x, "b": [y, None]},), {}),
        lambda x, y: (({"b": [y, None], "a": x}, y), {}),
        lambda x, y: (({"a": x}, y, x), {"scale": 3}),
        lambda x, y: (({"a": x}, y, x), {"scale": 4}),
        lambda x, y: (({"a": x},), {"mode": ("mean", 2)}),
        lambda x, y: (({"a": x},), {"mode": ("mean", 3)}),
        lambda x, y: (({"a": x},), {"bias": y, "scale": 1}),
        lambda x, y: (({"a": x},), {"scale": 1, "bias": None}),
        lambda x, y: (({"a": (x, x)},), {}),
    ]
    for _ in range(3):
        for call in calls:
            (args, kwargs), (jargs, jkwargs) = call(x, y), call(jx, jy)
            assert plain(op(*args, **kwargs)) == plain(blended(*jargs, **jkwargs))


def test_static_values_that_are_equal_but_of_other_types() -> None:
    def times(p: dict[str, jax.Array], n: Any) -> jax.Array:
        return p["x"] * (10 if n is True else n)

    op = make(times, static=("n",))
    x = torch.ones(1, device="tpu")
    for _ in range(2):
        assert [op({"x": x}, n).item() for n in (1, True, 1.0, 2)] == [1, 10, 1, 2]


def test_gradients_through_a_remembered_layout() -> None:
    op = make(blended, static=("mode",))
    for _ in range(3):
        x = torch.ones(2, device="tpu", requires_grad=True)
        op({"a": x, "b": x}, x, scale=3)["sum"].sum().backward()
        assert x.grad is not None and x.grad.tolist() == [7, 7]


def test_mistakes_after_a_call_that_was_right() -> None:
    op = make(blended, static=("mode",))
    x = torch.ones(2, device="tpu")
    for _ in range(2):
        op({"a": x})
        with pytest.raises(TypeError, match=r"the pytree 'p' holds float \(1\.5\)"):
            op({"a": 1.5})
        with pytest.raises(TypeError, match="the pytree 'p' holds ndarray"):
            op({"a": np.ones(2)})
        op({"a": x}, mode=("sum", 2))
        with pytest.raises(TypeError, match="must be hashable, and ndarray is not"):
            op({"a": x}, mode=("sum", np.ones(1)))
        with pytest.raises(RuntimeError, match="Expected a value of type"):
            op({"a": x}, bias={"b": x})
        with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
            op({"a": x}, unknown=1)


def test_subclasses_and_modes_see_the_op() -> None:
    seen = []

    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    op = make(blended, static=("mode",))
    x = torch.ones(2, device="tpu")
    op({"a": x})
    with Log():
        assert op({"a": x})["sum"].tolist() == [2, 2]
    assert op.overload in seen
    parameter = torch.nn.Parameter(x)
    assert op({"a": parameter})["sum"].requires_grad

"""Calls with pytrees, whose layout is remembered, are bound as the first of them is."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_nodes_of_many_types_in_and_out() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Node:
        value: Any
        name: str = dataclasses.field(metadata={"static": True})

    class Pair(NamedTuple):
        left: Any
        right: Any

    def doubled(p: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, p)

    op = make(doubled)
    x = torch.ones(1, device="tpu")
    trees = [
        x,
        (x,),
        [x, [x, ()]],
        {"b": x, "a": {(2,): x, (1,): None}},
        Pair(x, [x]),
        {"n": Node({"x": x}, "one")},
        {"n": Node({"x": x}, "two")},
        collections.OrderedDict(b=x, a=x),
        {"b": x, "a": x},
        [x] * 200,
    ]
    for tree in trees:
        for _ in range(3):
            want = jax.tree.map(lambda t: [2 * v for v in t.tolist()], tree)
            got = op(tree)
            assert plain(got) == want
            assert jax.tree.structure(got) == jax.tree.structure(tree)
            if isinstance(tree, dict):
                assert list(got) == list(jax.tree.map(lambda t: t, tree))


def test_numbers_that_are_equal_but_of_other_signs() -> None:
    def signs(p: list[jax.Array], n: float) -> jax.Array:
        return jnp.copysign(p[0], n)

    op = make(signs)
    x = torch.ones(1, device="tpu")
    for _ in range(2):
        got = [op([x], n).item() for n in (0.0, -0.0, -0.0, 2, -2, float("-inf"))]
        assert got == [1, -1, -1, 1, -1, -1]


def test_results_that_are_no_pytree() -> None:
    def both(p: dict[str, jax.Array], rest: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return p["x"] + 1, p["x"] + len(rest)

    def one(p: dict[str, jax.Array], bias: jax.Array | None = None) -> tuple[jax.Array]:
        return (p["x"] if bias is None else p["x"] + bias,)

    pair, single = make(both), make(one)
    for grad in (False, True):
        x = torch.ones(1, device="tpu", requires_grad=grad)
        for _ in range(2):
            assert plain(pair({"x": x}, [])) == ([2], [1])
            assert plain(pair({"x": x}, [x])) == ([2], [2])
            assert plain(single({"x": x})) == plain(single({"x": x}, None)) == ([1],)
            assert plain(single({"x": x}, x)) == ([2],)


def test_modes_that_change_what_a_call_does() -> None:
    def doubled(p: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"y": 2 * p["x"]}

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    op, low = make(doubled), make(doubled, cast_inputs=torch.bfloat16)
    x = torch.ones(2, device="tpu")
    for _ in range(2):
        assert op({"x": x})["y"].tolist() == [2, 2]
        assert low({"x": x})["y"].dtype == torch.float32
        with torch.autocast("tpu"):
            assert low({"x": x})["y"].dtype == torch.bfloat16
        with Log():
            op({"x": x})
        with torch.inference_mode():
            assert op({"x": x})["y"].is_inference()
        with torch.no_grad():
            assert not op({"x": torch.nn.Parameter(x)})["y"].requires_grad
    assert seen == [op.overload] * 2


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

"""Values and comparisons of symbolic dims."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tpu_core.pjrt import symbolic_dims

EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a product": lambda n, m: 3 * n * m * m - 7,
    "a quotient": lambda n, m: (n * m + 5) // 4,
    "a remainder": lambda n, m: (n - 30) % (m + 1),
    "nested": lambda n, m: ((n // 3) * m + 2) // (m % 5 + 1) - m,
    "the larger": lambda n, m: jax.core.max_dim(n - 5, m * 2),
    "the smaller": lambda n, m: jax.core.min_dim(n - 5, m * 2) // 3,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_values(name: str) -> None:
    function, draw = EXPRESSIONS[name], random.Random(0)
    expression = function(*symbolic_dims.dims(2))
    for _ in range(50):
        n, m = (draw.randint(2, 90) for _ in range(2))
        assert symbolic_dims.value(expression, [n, m]) == function(n, m)


def test_a_condition_is_each_comparison() -> None:
    n, m = symbolic_dims.dims(2)
    with symbolic_dims.comparing([n, m], [6, 9]) as conditions:
        asked = [n < 8, n == 7, m % 3 == 0, n == m, n >= m - 3, n * m == m * n, n >= 2, m != 40]
    assert asked == [True, False, False, False, True, True, True, True]
    assert conditions.always_hold([[6, 8]])
    for values in ([8, 10], [7, 10], [6, 9], [5, 5], [4, 8], [6, 40]):
        assert not conditions.always_hold([values]), values


def test_a_comparison_outside_is_jaxs() -> None:
    (n,) = symbolic_dims.dims(1)
    with symbolic_dims.comparing([n], [6]):
        pass
    with pytest.raises(Exception, match="inconclusive"):
        bool(n < 8)
    exported = export.export(jax.jit(lambda x: jnp.sum(x) + x.shape[0]))(
        jax.ShapeDtypeStruct(export.symbolic_shape("k, 3"), jnp.float32)
    )
    assert exported.call(jnp.ones((5, 3), jnp.float32)) == 20


def test_what_holds_for_all_values() -> None:
    dims = n, m = symbolic_dims.dims(2, bounds=[5, 9])
    values = [(a, b) for a in range(2, 6) for b in range(2, 10)]
    asked: list[tuple[Callable[[], bool], bool]] = [
        (lambda: n == 6, True),
        (lambda: n == 4, False),
        (lambda: n % 3 == 3, True),
        (lambda: n * m > 3 * n, False),
        (lambda: n * m > n, True),
    ]
    for ask, expected in asked:
        with symbolic_dims.comparing(dims, [2, 2]) as conditions:
            ask()
        assert conditions.always_hold(values) == expected
    with symbolic_dims.comparing(dims, [2, 2]) as conditions:
        assert n != m
    assert not conditions.always_hold(None)


def test_lookups_in_the_cache_of_shapes_are_no_comparisons() -> None:
    # Of a few hundred sizes some lie beside that of a dim in the hash table.
    kept = [jax.typeof(np.zeros((k, k + 1), np.float32)) for k in range(2, 400)]
    for _ in range(100):
        n, m = symbolic_dims.dims(2)
        with symbolic_dims.comparing([n, m], [6, 9]) as conditions:
            jax.make_jaxpr(jnp.negative)(jax.ShapeDtypeStruct((n, m), jnp.float32))
        assert not list(conditions)
    assert kept

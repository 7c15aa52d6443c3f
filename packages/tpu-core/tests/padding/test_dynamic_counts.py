"""Functions of sizes that a program computes: right for each size, or refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_core.padding.dynamic_counts import run_with_dynamic_counts
from tpu_core.padding.sizes import NotPaddableError


def run(function, count: int, bound: int) -> list[np.ndarray]:
    """Results of a function of the first ``count`` of ``bound`` elements."""

    def trace(sizes):
        return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((sizes[0],), np.float32))

    def program(x, n):
        return run_with_dynamic_counts(trace, [(x, [0])], [n], [bound])

    x = np.arange(1, bound + 1, dtype=np.float32)
    return [np.asarray(y) for y in jax.jit(program)(x, np.int32(count))]


def halves(x):
    return (x * x.shape[0]).sum() if x.shape[0] <= 50 else x.sum()


def rounded(x):
    return jnp.broadcast_to(x.sum(), (3,)) * (x.shape[0] // 40)


@pytest.mark.parametrize("bound", [60, 100_000])
def test_a_size_enters_as_the_function_that_it_is(bound):
    (total,) = run(lambda x: jnp.concatenate([x, x]).sum(), 7, bound)
    assert total == 2 * 28


@pytest.mark.parametrize("bound", [60, 400, 100_000])
@pytest.mark.parametrize("function", [halves, rounded])
def test_a_function_with_a_threshold_beyond_the_samples_is_refused(function, bound):
    with pytest.raises(NotPaddableError):
        run(function, 55, bound)


def test_below_its_threshold_it_runs():
    (total,) = run(halves, 5, 45)
    assert total == 5 * 15

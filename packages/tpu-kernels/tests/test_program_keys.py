"""Programs of JAX functions in the cache: found again, and only for the same code."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpu_kernels
from tpu_core.lowering.registry import REGISTRY
from tpu_kernels.digest import digest

PROGRAM = """
import enum, sys
import jax, jax.numpy as jnp, torch
import tpu_kernels

FACTOR = float(sys.argv[1])
TABLE = jnp.arange(4.0) + FACTOR

class Kind(enum.Enum):
    SUM = 1

@tpu_kernels.jax_op("program::f", static=("kind", "act"))
def f(x: jax.Array, tree: dict, kind: Kind, act=jnp.tanh) -> dict:
    y = jax.lax.fori_loop(0, 3, lambda i, a: a * FACTOR, act(x)) + TABLE @ jnp.ones(4)
    return {"y": y * tree["scale"]}

x = torch.ones(3).to("tpu").requires_grad_()
scale = torch.full((), 2.0).to("tpu")
y = f(x, {"scale": scale}, Kind.SUM)["y"]
(g,) = torch.autograd.grad(y.sum(), x)
w = tpu_kernels.call_jax(lambda x: x * FACTOR, x.detach())
print(y.tolist()[0], g.tolist()[0], w.tolist()[0])
print(int(torch.tpu.metrics()["compiles"]))
"""


def run(folder: Path, factor: float) -> tuple[list[float], int]:
    environment = {**os.environ, "TPU_CACHE_DIR": str(folder), "PYTHONHASHSEED": "random"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(factor)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    values, compiles = result.stdout.splitlines()
    return [float(v) for v in values.split()], int(compiles)


def expected(factor: float) -> list[float]:
    y = 2 * (np.tanh(1.0) * factor**3 + 6 + 4 * factor)
    return [y, 2 * factor**3 / np.cosh(1.0) ** 2, factor]


def test_another_process_compiles_nothing_and_other_code_is_another_program(tmp_path: Path) -> None:
    values, compiles = run(tmp_path, 2.0)
    np.testing.assert_allclose(values, expected(2.0), rtol=1e-5)
    assert compiles > 0
    assert run(tmp_path, 2.0) == (values, 0)
    # The same ops with the same arguments: only what the functions compute has changed.
    values, compiles = run(tmp_path, 3.0)
    np.testing.assert_allclose(values, expected(3.0), rtol=1e-5)
    assert compiles > 0


def test_a_compiled_graph_is_known_by_what_its_functions_compute() -> None:
    from tpu_compile.graph_op import GRAPHS

    fn = tpu_kernels.jax_op("test_program_keys::f", lambda x: jnp.sin(x) * 3)
    compiled = torch.compile(lambda x: fn(x) + 1, fullgraph=True)
    torch.testing.assert_close(
        compiled(torch.ones(5).to("tpu")).cpu(), torch.sin(torch.ones(5)) * 3 + 1
    )
    aval = jax.ShapeDtypeStruct((5,), jnp.float32)
    entries = [REGISTRY.get(f"{n}.default") for n in ("tpu_compile.graph", "test_program_keys.f")]
    graph, own = (e.identity for e in entries if e is not None and e.identity is not None)
    assert graph([aval], [], [], [], list(GRAPHS)[-1]) == own(aval)


def test_digests_know_constants_and_inner_functions() -> None:
    def of(fn: object) -> str:
        return digest(jax.make_jaxpr(fn)(jnp.ones(3)))

    small, large = np.arange(3000.0, dtype=np.float32), np.arange(3000.0, dtype=np.float32)
    large[1500] = -1  # in the part of an array that is not printed
    assert of(lambda x: x.sum() + jnp.asarray(small).sum()) != of(
        lambda x: x.sum() + jnp.asarray(large).sum()
    )
    one, two = (jax.jit(lambda x, n=n: jnp.sin(x) * n) for n in (1.0, 2.0))
    assert of(lambda x: one(x)) != of(lambda x: two(x))
    assert of(lambda x: x * 2) == of(lambda y: y * 2)
    looped = (lambda x, n=n: jax.lax.fori_loop(0, 3, lambda i, a: a + n, x) for n in (1.0, 2.0))
    assert len({of(f) for f in looped}) == 2


@dataclasses.dataclass(frozen=True)
class Settings:
    value: Any


class Own:
    """Equal by value, as 1 and 1.0 are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Own({self.value!r})"


class Level(enum.IntEnum):
    ONE = 1


def told(value: Any) -> float:
    """A number that is another for all of `EQUAL` that are not the same."""
    if isinstance(value, (tuple, list)):
        return 0.5 + 2 * sum(map(told, value))
    if isinstance(value, frozenset):
        return 0.25 + 4 * sum(map(told, value))
    if isinstance(value, Settings | Own):
        return (0.125 if isinstance(value, Own) else 0.0625) + 8 * told(value.value)
    kinds = [bool, int, float, Level, np.int64, np.float32, np.float64, complex]
    number = 1.0 + kinds.index(type(value))
    if isinstance(value, complex):
        return number
    return number + 20 * (math.copysign(1, value) < 0) + 40 * (value != value)


NUMBERS: list[Any] = [1, 1.0, True, Level.ONE, np.int64(1), np.float32(1), np.float64(1), 1 + 0j]
NUMBERS += [0.0, -0.0, np.float32(0.0), np.float32(-0.0), math.nan, float("nan")]
KINDS: list[Callable[[Any], Any]] = [
    lambda n: n,
    lambda n: (n, 2),
    lambda n: ((n,),),
    lambda n: frozenset([n]),
    Settings,
    Own,
    lambda n: Settings((n,)),
    lambda n: (Settings(Own(n)),),
]
EQUAL = [kind(n) for kind in KINDS for n in NUMBERS]


def test_static_arguments_that_are_equal_and_not_the_same() -> None:
    op = tpu_kernels.jax_op("test_program_keys::told", lambda x, v: x + told(v), static="v")
    x = torch.zeros(2).to("tpu")
    expected = [told(v) for v in EQUAL]
    for _ in range(2):  # the second by code that was written for the first
        assert torch.stack([op(x, v)[0] for v in EQUAL]).tolist() == expected


def closing_over(value: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x + told(value)


def with_default(value: Any) -> Callable[[jax.Array], jax.Array]:
    def f(x: jax.Array, value: Any = value) -> jax.Array:
        return x + told(value)

    return f


@pytest.mark.parametrize(
    "make",
    [
        closing_over,
        with_default,
        lambda value: functools.partial(lambda v, x: x + told(v), value),
        lambda value: functools.partial(lambda x, v: x + told(v), v=value),
    ],
)
def test_functions_over_equal_values_that_are_not_the_same(make: Callable[[Any], Any]) -> None:
    x = torch.zeros(2).to("tpu")
    values = [*EQUAL, *([n] for n in NUMBERS)]
    found = torch.stack([tpu_kernels.call_jax(make(v), x)[0] for v in values]).tolist()
    assert found == [told(v) for v in values]


def test_a_function_over_what_is_written_between_calls() -> None:
    array, items, table = np.zeros(2, np.float32), [0.0], {"a": 0.0}
    x = torch.zeros(2).to("tpu")

    def f(x: jax.Array) -> jax.Array:
        return x + array + items[0] + table["a"]

    found = []
    for n in range(3):
        array += 1
        items[0], table["a"] = 10.0 * n, 100.0 * n
        found.append(tpu_kernels.call_jax(f, x)[0])
    assert torch.stack(found).tolist() == [1.0, 112.0, 223.0]


def test_an_address_that_another_object_gets() -> None:
    """An array is large and lives for one call; the next one may be in its place."""
    x = torch.zeros(2).to("tpu")
    found = []
    for n in range(6):
        large = np.full(1 << 15, n, np.float32)
        found.append(tpu_kernels.call_jax(functools.partial(lambda a, x: x + a[0], large), x)[0])
        del large
    assert torch.stack(found).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_jax_settings_are_those_of_the_call() -> None:
    sizes = tpu_kernels.jax_op(
        "test_program_keys::sizes",
        lambda x: (x + jnp.arange(2).dtype.itemsize).astype(jnp.arange(2).dtype),
    )
    key = tpu_kernels.jax_op(
        "test_program_keys::draw", lambda x: x + jax.random.uniform(jax.random.key(0), (4,))
    )
    x, zeros = torch.zeros(2).to("tpu"), torch.zeros(4).to("tpu")
    found = [sizes(x)]
    with jax.enable_x64(True):
        found.append(sizes(x))
    found.append(sizes(x))
    with jax.enable_x64(True):
        found.append(sizes(x.clone()))
    # Recorded together, traced one after the other.
    expected = [torch.full((2,), n, dtype=d) for n, d in ((4, torch.int32), (8, torch.int64)) * 2]
    torch.testing.assert_close([f.cpu() for f in found], expected)
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            expected_draw = np.asarray(jax.random.uniform(jax.random.key(0), (4,)))
            np.testing.assert_array_equal(key(zeros).cpu().numpy(), expected_draw)


@pytest.mark.parametrize("name", ["device", "layout", "memory_format", "pin_memory", "generator"])
def test_names_that_schemas_keep_are_refused(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def f(x, {name}: int = 3):\n    return x + {name}", scope)
    with pytest.raises(TypeError, match=f"'{name}' is an argument that PyTorch keeps"):
        tpu_kernels.jax_op(f"test_program_keys::{name}", scope["f"])

"""Programs of JAX functions in the cache: found again, and only for the same code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
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
    from tpu_compile.graphs import GRAPHS

    fn = tpu_kernels.jax_op("test_program_keys::f", lambda x: jnp.sin(x) * 3)
    compiled = torch.compile(lambda x: fn(x) + 1, fullgraph=True)
    torch.testing.assert_close(
        compiled(torch.ones(5).to("tpu")).cpu(), torch.sin(torch.ones(5)) * 3 + 1
    )
    aval = jax.ShapeDtypeStruct((5,), jnp.float32)
    entries = [REGISTRY.get(f"{n}.default") for n in ("tpu_compile.graph", "test_program_keys.f")]
    graph, own = (e.identity for e in entries if e is not None and e.identity is not None)
    assert graph([aval], [], [], list(GRAPHS)[-1]) == own(aval)


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

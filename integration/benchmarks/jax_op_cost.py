"""What a call of a `jax_op` costs the Python thread against one of an op that PyTorch has.

Both are recorded on ``tpu``, on tiny tensors, in turn in one process; CPU time of the calling
thread, so that other load on the machine does not count. Pin one core for figures that repeat:

    taskset -c 0 python integration/benchmarks/jax_op_cost.py --json out.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import harness
import jax
import jax.numpy as jnp
import torch
from recording_cost import microseconds

import tpu_kernels


@tpu_kernels.jax_op("bench::tanh")
def jax_tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@tpu_kernels.jax_op("bench::add")
def jax_add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


@tpu_kernels.jax_op("bench::mul")
def jax_mul(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * y


@tpu_kernels.jax_op("bench::lerp")
def jax_lerp(x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
    return x + weight * (y - x)


@tpu_kernels.jax_op("bench::cumsum")
def jax_cumsum(x: jax.Array, dim: int) -> jax.Array:
    return jnp.cumsum(x, dim)


@tpu_kernels.jax_op("bench::sorted")
def jax_sorted(x: jax.Array, dim: int, descending: bool) -> tuple[jax.Array, jax.Array]:
    order = jnp.argsort(x, dim, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@tpu_kernels.jax_op("bench::tree")
def jax_tree(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"sum": tree["x"] + tree["y"]}


def pairs() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The same computation as an op of PyTorch and as a `jax_op`, by name."""
    x, y, z = (torch.ones(4, device="tpu") for _ in range(3))
    g = torch.ones(4, device="tpu", requires_grad=True)

    return {
        "tanh(x)": (lambda: torch.tanh(x), lambda: jax_tanh(x)),
        "add(x, y)": (lambda: torch.add(x, y), lambda: jax_add(x, y)),
        "lerp(x, y, z)": (lambda: torch.lerp(x, y, z), lambda: jax_lerp(x, y, z)),
        "cumsum(x, 0)": (lambda: torch.cumsum(x, 0), lambda: jax_cumsum(x, 0)),
        "sort(x, 0, False)": (lambda: torch.sort(x, 0, False), lambda: jax_sorted(x, 0, False)),
        # The gradient of a sum needs nothing of its arguments; that of any JAX function may.
        "add, with grad": (lambda: torch.add(g, y), lambda: jax_add(g, y)),
        "mul, with grad": (lambda: torch.mul(g, y), lambda: jax_mul(g, y)),
        "tanh, with grad": (lambda: torch.tanh(g), lambda: jax_tanh(g)),
        "tanh and its gradient": (
            lambda: torch.autograd.grad(torch.tanh(g), g, y),
            lambda: torch.autograd.grad(jax_tanh(g), g, y),
        ),
        "a pytree (against add)": (
            lambda: torch.add(x, y),
            lambda: jax_tree({"x": x, "y": y}),
        ),
    }


def main() -> None:
    options = harness.arguments(__doc__, batches=15)
    torch.set_num_threads(1)
    rows = []
    with torch.tpu.set_eager_mode("fused"):
        for name, (built_in, ours) in pairs().items():
            times: tuple[list[float], list[float]] = ([], [])
            for op in (built_in, ours):
                microseconds(op, 2, torch.tpu.synchronize)
            for _ in range(options.batches):
                for op, found in zip((built_in, ours), times):
                    found += microseconds(op, 1, torch.tpu.synchronize)
            theirs, mine = map(statistics.median, times)
            rows.append(
                {
                    "call": name,
                    "built in (us)": theirs,
                    "jax_op (us)": mine,
                    "ratio": mine / theirs,
                }
            )
    harness.report("Cost of a call: jax_op against an op of PyTorch", rows, options)


if __name__ == "__main__":
    main()

"""What a call of a compiled function costs the Python thread, against `jax.jit`'s.

A function of many small inputs, each used once, so that the call is nearly all of it. CPU time of
the calling thread, the runners in turn in one process, each call run as a program of its own
(Strict): with Dynamo's guards, the backend's callable alone, and ``jax.jit``. Pin one core for
figures that repeat:

    taskset -c 0 python integration/benchmarks/call_overhead.py --json out.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch

CALLS = 100


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    started = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - started) / CALLS * 1e6


def total(*xs: Any) -> Any:
    """What is computed, of torch's tensors and of jax's arrays."""
    result = xs[0]
    for x in xs[1:]:
        result = result + x
    return result


def runners(inputs: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The call of each runner, and what waits for it."""
    import jax
    import jax.numpy as jnp

    from tpu_compile import backend

    tensors = [torch.ones(4, device="tpu") for _ in range(inputs)]
    arrays = [jnp.ones(4) for _ in range(inputs)]
    alone: list[Callable[..., Any]] = []

    def keep(model: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        alone.append(backend.tpu(model, example_inputs))
        return alone[-1]

    torch.compile(total, backend=keep, fullgraph=True)(*tensors)
    torch._dynamo.reset()  # or the guards of both compiles would be checked
    compiled = torch.compile(total, fullgraph=True)
    jitted = jax.jit(total)
    wait = torch.tpu.synchronize
    return {
        "with guards": (lambda: compiled(*tensors), wait),
        "backend alone": (lambda: alone[0](*tensors), wait),
        "jax.jit": (lambda: jitted(*arrays), lambda: jitted(*arrays).block_until_ready()),
    }


def main() -> None:
    options = harness.arguments(__doc__, batches=25, inputs=100)
    torch.set_num_threads(1)
    with torch.tpu.set_eager_mode("strict"), torch.no_grad():
        calls = runners(options.inputs)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for batch in range(options.batches + 2):
            for name, (call, wait) in calls.items():
                taken = microseconds(call)
                wait()
                if batch >= 2:
                    times[name].append(taken)
    medians = {name: statistics.median(t) for name, t in times.items()}
    rows: list[dict[str, Any]] = [
        {"runner": name, "call (us)": t, "of jax.jit": t / medians["jax.jit"]}
        for name, t in medians.items()
    ]
    harness.report(f"Call of a compiled function of {options.inputs} inputs", rows, options)


if __name__ == "__main__":
    main()

"""What a call of a compiled function costs the Python thread, against `jax.jit`'s.

A function of many small inputs, each used once, so that the call is nearly all of it. CPU time of
the calling thread, the runners in turn in one process, each call run as a program of its own
(Strict): with Dynamo's guards, the backend's callable alone, and ``jax.jit``. Pin one core for
figures that repeat:

    taskset -c 0 python integration/benchmarks/call_overhead.py --json out.json

The other rows are parts that are not ours, and so the floor: Dynamo and AOTAutograd around a
callable that does nothing, XLA's execution of the program, and Dynamo around ``jax.jit``, which is
more than its parts: what runs between two checks of the guards takes them out of the processor's
cache.
"""

from __future__ import annotations

import statistics
import time
import types
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


def another() -> Callable[..., Any]:
    """`total` as a function of its own: Dynamo would check the guards of all of one's compiles."""
    return types.FunctionType(total.__code__.replace(), globals())


def runners(inputs: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The call of each runner, and what waits for it."""
    import jax
    import jax.numpy as jnp
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from tpu_compile import backend

    tensors = [torch.ones(4, device="tpu") for _ in range(inputs)]
    arrays = [jnp.ones(4) for _ in range(inputs)]
    made = [torch.ones(4, device="tpu")]
    jitted = jax.jit(total)
    executable = jitted.lower(*arrays).compile().runtime_executable()

    def compiled(backend: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = torch.compile(another(), backend=backend, fullgraph=True)
        function(*tensors)
        return function

    def callable_of(compile: Callable[..., Any]) -> Callable[..., Any]:
        kept: list[Callable[..., Any]] = []

        def keep(model: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            kept.append(compile(model, example_inputs))
            return kept[-1]

        compiled(keep)
        return kept[-1]

    def around(work: Callable[[], object]) -> Callable[..., Any]:
        return compiled(lambda *_: lambda *_: (work(), made)[1])

    def nothing(*_: Any) -> Any:
        return make_boxed_func(lambda *_: made)

    with_guards, alone = compiled("tpu"), callable_of(backend.tpu)
    dynamo, dynamo_around_jax = around(lambda: None), around(lambda: jitted(*arrays))
    autograd = callable_of(aot_autograd(fw_compiler=nothing, inference_compiler=nothing))
    wait = torch.tpu.synchronize

    def wait_for_jax() -> None:
        jitted(*arrays).block_until_ready()

    return {
        "with guards": (lambda: with_guards(*tensors), wait),
        "backend alone": (lambda: alone(*tensors), wait),
        "jax.jit": (lambda: jitted(*arrays), wait_for_jax),
        "Dynamo around nothing": (lambda: dynamo(*tensors), wait),
        "Dynamo around jax.jit": (lambda: dynamo_around_jax(*tensors), wait_for_jax),
        "AOTAutograd around nothing": (lambda: autograd(*tensors), wait),
        "XLA's execution": (lambda: executable.execute_sharded(arrays), wait_for_jax),
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

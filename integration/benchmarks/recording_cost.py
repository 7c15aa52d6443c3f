"""What an op costs the Python thread: recorded on ``tpu`` against run by torch on the CPU.

Tiny tensors, one process, the two devices in turn; CPU time of the calling thread, so that other
load on the machine does not count. Also Strict's whole path of a cached ``add`` against jax's op by
op, both waited for between batches. Pin one core for figures that repeat:

    taskset -c 0 python integration/benchmarks/recording_cost.py --json out.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import harness
import torch

OPS_PER_BATCH = 200


def operations(device: str) -> dict[str, Callable[[], object]]:
    """The ops by name, on tensors of one device."""
    x, y, z = (torch.ones(4, device=device) for _ in range(3))
    m = torch.ones(4, 4, device=device)
    g = torch.ones(4, device=device, requires_grad=True)
    return {
        "add": lambda: x + y,
        "add, scalar": lambda: x + 1.5,
        "add with grad": lambda: g + y,
        "add_": lambda: z.add_(y),
        "matmul": lambda: m @ m,
        "relu": lambda: torch.relu(x),
        "view": lambda: m.view(16),
        "transpose": lambda: m.t(),
        "index": lambda: m[1],
        "sum": lambda: x.sum(),
    }


def microseconds(
    op: Callable[[], object], batches: int, after: Callable[[], object]
) -> list[float]:
    """CPU time of one call, one figure a batch; ``after`` runs between batches and is not timed."""
    times = []
    for _ in range(batches):
        started = time.thread_time()
        for _ in range(OPS_PER_BATCH):
            op()
        times.append((time.thread_time() - started) / OPS_PER_BATCH * 1e6)
        after()
    return times


def main() -> None:
    options = harness.arguments(__doc__, batches=15)
    torch.set_num_threads(1)
    cpu, tpu = operations("cpu"), operations("tpu")
    torch.tpu.synchronize()
    flush = torch.tpu.synchronize
    rows = []
    with torch.tpu.set_eager_mode("fused"):
        for name in cpu:
            # In turn, so that both see the same machine.
            a, b = [], []
            microseconds(cpu[name], 1, lambda: None)
            microseconds(tpu[name], 1, flush)
            for _ in range(options.batches):
                a += microseconds(cpu[name], 1, lambda: None)
                b += microseconds(tpu[name], 1, flush)
            ours, theirs = statistics.median(b), statistics.median(a)
            rows.append(
                {
                    "op": name,
                    "torch cpu (us)": theirs,
                    "recorded (us)": ours,
                    "ratio": ours / theirs,
                }
            )
    harness.report("Recording cost per op, fused mode", rows, options)
    harness.report("A cached op run alone", strict_rows(options.batches), options)


def strict_rows(batches: int) -> list[dict[str, object]]:
    """Dispatch of one cached ``add``: Strict mode against jax."""
    import jax.numpy as jnp

    a, b = jnp.ones(4), jnp.ones(4)
    x, y = torch.ones(4, device="tpu"), torch.ones(4, device="tpu")
    with torch.tpu.set_eager_mode("strict"):
        microseconds(lambda: x + y, 2, torch.tpu.synchronize)
        microseconds(lambda: a + b, 2, lambda: None)
        ours, jax_op = [], []
        for _ in range(4 * batches):
            ours += microseconds(lambda: x + y, 1, torch.tpu.synchronize)
            jax_op += microseconds(lambda: a + b, 1, lambda: (a + b).block_until_ready())
    mine, theirs = statistics.median(ours), statistics.median(jax_op)
    return [{"op": "add", "jax (us)": theirs, "strict (us)": mine, "ratio": mine / theirs}]


if __name__ == "__main__":
    main()

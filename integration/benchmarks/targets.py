"""What the figures are held against: ratios between runners, and counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jobs

Runs = dict[tuple[str, str], dict[str, Any]]

TRAINED = ("mlp", "gpt", "resnet18")
# The form of JAX that a workload's step, first step and memory are compared with.
TWIN = {"mlp": "jax", "gpt": "jax3d", "resnet18": "jax"}


def rows(runs: Runs) -> list[dict[str, Any]]:
    """One row for each target whose figures are in ``runs``: (workload, runner) -> figures."""
    found = []
    for what, figure, limit, at_least in _checks(runs):
        if figure is not None:
            met = figure >= limit if at_least else figure <= limit
            sign = ">=" if at_least else "<="
            found.append(
                {
                    "what": what,
                    "figure": figure,
                    "target": f"{sign} {limit:g}",
                    "met": "yes" if met else "no",
                }
            )
    return found


def _checks(runs: Runs) -> Iterator[tuple[str, float | None, float, bool]]:
    """(what, figure or None, limit, whether the limit is the least) of every target."""

    def value(workload: str, runner: str, key: str) -> float | None:
        return runs.get((workload, runner), {}).get(key)

    def ratio(workload: str, ours: str, theirs: str, key: str = "cpu_ms") -> float | None:
        a, b = value(workload, ours, key), value(workload, theirs, key)
        return a / b if a is not None and b else None

    limits = {"small_ops": ("torch", 0.6), "mlp": ("jax", 1.0), "gpt": ("jax3d", 0.75)}
    limits["resnet18"] = ("jax", 0.75)
    for name, (other, limit) in limits.items():
        yield f"{name}: step, fused / {other}", ratio(name, "fused", other), limit, False
    limits = {"mlp": ("jax", 1.0), "gpt": ("jax3d", 0.75), "resnet18": ("jax", 0.75)}
    limits |= dict.fromkeys(jobs.INFERENCE, ("jax", 1.0))
    for name, (other, limit) in limits.items():
        yield f"{name}: step, compiled / {other}", ratio(name, "compiled", other), limit, False
    first = ratio("gpt", "compiled", "jax3d", "first_cpu_s")
    yield "gpt: cold first step, compiled / jax3d", first, 1.2, False
    speedups = {w: ratio(w, "strict", "fused") for w, r in runs if r == "fused"}
    for name in ("small_ops", "decode_static", "decode_growing", "accum"):
        yield f"{name}: strict / fused", speedups.get(name), 2.5, True
    known = {w: s for w, s in speedups.items() if s is not None}
    if known:
        mean = math.exp(sum(map(math.log, known.values())) / len(known))
        worst = min(known, key=lambda w: known[w])
        yield f"strict / fused, geometric mean of {len(known)}", mean, 1.5, True
        yield f"strict / fused, worst: {worst}", known[worst], 1.0, True
    for name in TRAINED:
        first = ratio(name, "fused", TWIN[name], "first_cpu_s")
        yield f"{name}: cold first step, fused / {TWIN[name]}", first, 1.3, False
    for (name, runner), run in runs.items():
        warm = run.get("warm")
        if runner == "fused" and warm:
            yield f"{name}: compiles of a second process", warm["compiles"], 0, False
            if name in TRAINED:
                share = warm["first_cpu_s"] / run["first_cpu_s"]
                yield f"{name}: first step, second process / cold", share, 0.2, False
    yield (
        *("rnn_dynamic: first sweep of 40 lengths, s", value("rnn_dynamic", "fused", "first_s")),
        *(10, False),
    )
    yield "rnn_dynamic: compiles", value("rnn_dynamic", "fused", "compiles"), 10, False
    first = ratio("rnn_dynamic", "compiled", "inductor", "first_cpu_s")
    yield "rnn_dynamic: first sweep, compiled / inductor", first, 0.5, False
    yield "rnn_dynamic: compiles, compiled", value("rnn_dynamic", "compiled", "compiles"), 8, False
    for name, limit in (("decode_static", 12), ("decode_growing", 30)):
        yield f"{name}: compiles", value(name, "fused", "compiles"), limit, False
        later = value(name, "fused", "compiles_later")
        yield f"{name}: compiles of later runs", later, 0, False
    yield "accum: compiles after step 3", value("accum", "fused", "compiles_after_3"), 0, False
    later = value("accum", "background", "compiles_after_20")
    yield "accum: compiles after step 20, background", later, 0, False
    for name in TRAINED:
        peak = ratio(name, "fused", TWIN[name], "peak_mb")
        yield f"{name}: peak device memory, fused / {TWIN[name]}", peak, 1.1, False

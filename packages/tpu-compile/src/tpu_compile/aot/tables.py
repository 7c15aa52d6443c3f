"""The plan in a terminal, as rich tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from tpu_compile.aot.plan import Plan
from tpu_core.errors import format_bytes

# Columns of numbers.
_NUMERIC = ("bytes", "value", "runs", "calls", "devices", "HBM", "of it", "MFU bound")


def count(n: float, unit: str) -> str:
    """A large number for people, in decimal units: ``"1.50 TFLOP"``."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(n) < 1000:
            return f"{n:.3g} {prefix}{unit}"
        n /= 1000
    return f"{n:.3g} E{unit}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def verdict(plan: Plan) -> str:
    """Verdict on whether it fits, in a sentence."""
    memory = plan.memory
    share = f"{format_bytes(memory.total)} of {format_bytes(memory.capacity)} HBM a device"
    if memory.fits:
        return f"fits: {share} ({memory.total / memory.capacity:.0%})"
    return f"does not fit: {share}, {format_bytes(memory.missing)} too much"


def memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of the memory table: name, bytes, remark."""
    memory = plan.memory
    kinds: dict[str, int] = defaultdict(int)
    for item in plan.inputs:
        kinds[item.kind] += item.padded_bytes
    rows = [(kind, format_bytes(size), "") for kind, size in kinds.items() if size >= 1024]
    if memory.outputs is not None and memory.aliased is not None:
        own = max(0, memory.outputs - memory.aliased)
        rows.append(("outputs", format_bytes(own), f"and {format_bytes(memory.aliased)} in place"))
        rows.append(("temporaries", format_bytes(memory.temporaries or 0), ""))
        rows.append(("generated code", format_bytes(memory.code or 0), ""))
    rows.append(("total", format_bytes(memory.total), verdict(plan)))
    return rows


def cost_rows(plan: Plan) -> list[tuple[str, str]]:
    """Rows of the cost table: a step on one device."""
    cost, line = plan.cost, plan.roofline
    if cost is None or line is None:
        return [("model's products, all devices", count(plan.model_flops, "FLOP"))]
    rows = [
        ("floating point operations", count(cost.flops, "FLOP")),
        ("passes of the matrix unit", count(cost.mxu_flops, "FLOP")),
        ("bytes accessed", format_bytes(cost.bytes_accessed)),
        ("of these in HBM", format_bytes(cost.hbm_bytes)),
        ("least time: compute", duration(line.compute)),
        ("least time: HBM", duration(line.memory)),
        ("least time: links", duration(line.communication)),
        ("least time of a step", f"{duration(line.step)}, bound by {line.bound}"),
    ]
    if plan.mfu is not None:
        rows.append(("bound on MFU", f"{plan.mfu:.1%}"))
    return rows


def largest_rows(plan: Plan, most: int = 6) -> list[tuple[str, str, str]]:
    """The largest inputs and temporaries: what, bytes, where from."""
    inputs = [
        (i.padded_bytes, f"{i.dtype}{list(i.shape)}", f"{i.kind} {i.name}") for i in plan.inputs
    ]
    inner = [
        (t.bytes, t.shape, f"temporary of {t.module or 'no module'}") for t in plan.memory.largest
    ]
    rows = sorted(inputs, reverse=True)[:most] + sorted(inner, reverse=True)[:most]
    return [(name, format_bytes(size), where) for size, name, where in sorted(rows, reverse=True)]


def tables(plan: Plan) -> Iterator[Any]:
    """The plan, piece by piece."""
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    yield Text(f"{plan.program} of {plan.model} on {plan.topology} ({axes})", "bold")
    yield Text(verdict(plan), "green" if plan.fits else "bold red")
    yield _table("HBM of one device", ("what", "bytes", ""), memory_rows(plan))
    yield _table("Largest", ("shape", "bytes", "what"), largest_rows(plan))
    yield _table("A step on one device", ("what", "value"), cost_rows(plan))
    if plan.kernels:
        uses = [(k.op, k.implementation, str(k.calls), k.why) for k in plan.kernels]
        yield _table("Kernels", ("op", "implementation", "calls", "why"), uses)
    if plan.cost is not None and plan.cost.collectives:
        rows = [
            (c.kind, str(c.group), str(c.count), format_bytes(c.bytes), c.module)
            for c in plan.cost.collectives
        ]
        names = ("collective", "devices", "runs", "bytes", "most of it from")
        yield _table("Collectives in a step", names, rows)
    for title, lines in (("Notes", plan.notes), ("Advice", plan.advice)):
        if lines:
            yield Text(f"\n{title}", "bold")
            for line in lines:
                yield Text(f"  * {line}")
    yield Text("\n" + ", ".join(f"{k} {v:.1f} s" for k, v in plan.seconds.items()), "dim")


def sweep_table(plans: Sequence[Plan]) -> Table:
    """Plans for several topologies side by side."""
    rows = []
    for plan in plans:
        line = plan.roofline
        rows.append(
            (
                plan.topology,
                ", ".join(f"{k}={v}" for k, v in plan.mesh.items()),
                format_bytes(plan.memory.total),
                f"{plan.memory.total / plan.memory.capacity:.0%}",
                duration(line.step) if line else "does not fit",
                line.bound if line else "",
                f"{plan.mfu:.1%}" if plan.mfu is not None else "",
            )
        )
    names = ("topology", "mesh", "HBM", "of it", "least time", "bound by", "MFU bound")
    return _table("Sweep", names, rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if i and name in _NUMERIC else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

"""The plan as an HTML page: one file, with its style inside."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tpu_compile.aot import tables
from tpu_compile.aot.plan import Plan
from tpu_core.errors import format_bytes


def render(plans: Sequence[Plan], whole_page: bool = True) -> str:
    """Plans as HTML.

    Args:
        plans: One, or those of a sweep.
        whole_page: A document for a browser, else a part of one for a notebook.
    """
    template = _environment().get_template("plan.html")
    return str(template.render(plans=plans, whole_page=whole_page))


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tpu_compile.aot", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"bytes": format_bytes, "duration": tables.duration}
    environment.globals |= {
        "verdict": tables.verdict,
        "memory_rows": tables.memory_rows,
        "largest_rows": tables.largest_rows,
        "cost_rows": tables.cost_rows,
        "parts": _parts,
    }
    return environment


def _parts(plan: Plan) -> list[tuple[str, float]]:
    """What fills the memory, as shares of the larger of capacity and need."""
    memory = plan.memory
    whole = max(memory.total, memory.capacity)
    if memory.arguments is None:
        return [("everything", memory.total / whole)]
    own = max(0, (memory.outputs or 0) - (memory.aliased or 0))
    sizes = {
        "arguments": memory.arguments,
        "outputs": own,
        "temporaries": memory.temporaries or 0,
        "code": memory.code or 0,
    }
    return [(name, size / whole) for name, size in sizes.items() if size]

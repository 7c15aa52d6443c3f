"""The plan as an HTML page: one file, with its style inside."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpu_compile.aot import tables
from tpu_compile.aot.plan import Plan
from tpu_core.errors import format_bytes
from tpu_core.extend import html_template

if TYPE_CHECKING:
    from jinja2 import Template


def render(plans: Sequence[Plan], whole_page: bool = True) -> str:
    """Plans as HTML.

    Args:
        plans: One, or those of a sweep.
        whole_page: A document for a browser, else a part of one for a notebook.
    """
    return _template().render(
        plans=plans,
        whole_page=whole_page,
        verdict=tables.verdict,
        memory_rows=tables.memory_rows,
        largest_rows=tables.largest_rows,
        cost_rows=tables.cost_rows,
        parts=_parts,
    )


@functools.cache
def _template() -> Template:
    filters = {"bytes": format_bytes, "duration": tables.duration}
    return html_template("tpu_compile.aot", "plan.html", **filters)


def _parts(plan: Plan) -> list[tuple[str, float]]:
    """Memory use as shares of the larger of capacity and need."""
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

"""The plan as an HTML page: one file, with its style inside."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_compile.aot import tables
from tpu_compile.aot.plan import Input, Plan
from tpu_core.errors import format_bytes
from tpu_core.extend import html_template

if TYPE_CHECKING:
    from jinja2 import Template

# In the order of their colours.
KINDS = (
    *("parameter", "optimizer state", "buffer", "batch"),
    *("temporaries", "outputs", "generated code", "random seed"),
)
_STATE = KINDS[:3]
_MOST_ROWS = 12


def render(plans: Sequence[Plan], whole_page: bool = True) -> str:
    """Plans as HTML.

    Args:
        plans: One, or those of a sweep.
        whole_page: A document for a browser, else a part of one for a notebook.
    """
    return _template().render(
        plans=plans,
        whole_page=whole_page,
        kinds=KINDS,
        usage=usage,
        modules=modules,
        memory_rows=tables.memory_rows,
        largest_rows=tables.largest_rows,
        cost_rows=tables.cost_rows,
    )


@functools.cache
def _template() -> Template:
    filters = {"bytes": format_bytes, "duration": tables.duration}
    return html_template("tpu_compile.aot", "plan.html", **filters)


def usage(plan: Plan) -> list[tuple[str, int]]:
    """HBM of one device by kind, bytes, in the order of `KINDS`."""
    memory = plan.memory
    sizes: dict[str, int] = defaultdict(int)
    for item in plan.inputs:
        sizes[item.kind] += item.padded_bytes
    if memory.outputs is None:  # libtpu says the total alone
        sizes["temporaries"] = memory.total - sum(sizes.values())
    else:
        sizes["outputs"] = memory.outputs - (memory.aliased or 0)
        sizes["temporaries"] = memory.temporaries or 0
        sizes["generated code"] = memory.code or 0
    return [(kind, sizes[kind]) for kind in KINDS if sizes[kind] > 0]


@dataclass(frozen=True)
class ModuleRow:
    """A module's part of HBM: its name, and bytes by kind."""

    name: str
    kinds: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def modules(plan: Plan) -> list[ModuleRow]:
    """Parameters, buffers and optimizer state of one device by module, the largest first.

    A module that has more than half of all stands as its parts; what comes after `_MOST_ROWS` rows
    is one row.
    """
    items = [i for i in plan.inputs if i.kind in _STATE]
    whole = sum(i.padded_bytes for i in items)
    groups = _split(items, 0)
    while len(groups) < _MOST_ROWS:
        name, largest = max(groups.items(), key=lambda g: _bytes(g[1]), default=("", []))
        parts = _split(largest, name.count(".") + 1) if name else {}
        if 2 * _bytes(largest) < whole or len(parts) < 2:
            break
        del groups[name]
        groups |= parts
    rows = sorted((_row(*group) for group in groups.items()), key=lambda r: -r.bytes)
    rest = [i for r in rows[_MOST_ROWS:] for i in groups[r.name]]
    return [*rows[:_MOST_ROWS], *([_row("others", rest)] if rest else [])]


def _split(items: Sequence[Input], depth: int) -> dict[str, list[Input]]:
    """Inputs by the first components of their names: the modules, not the tensors in them."""
    found: dict[str, list[Input]] = defaultdict(list)
    for item in items:
        parts = item.name.split(".")
        # The last component of a parameter is the tensor, of optimizer state the last two.
        tensor = 2 if item.kind == "optimizer state" else 1
        module = parts[:-tensor][: depth + 1]
        if len(module) == depth + 1 and depth + 1 < len(parts) - tensor and module[-1] == "*":
            module = parts[: depth + 2]
        found[".".join(module) or "the model itself"].append(item)
    return dict(found)


def _bytes(items: Sequence[Input]) -> int:
    return sum(i.padded_bytes for i in items)


def _row(name: str, items: Sequence[Input]) -> ModuleRow:
    kinds: dict[str, int] = defaultdict(int)
    for item in items:
        kinds[item.kind] += item.padded_bytes
    return ModuleRow(name, {kind: kinds[kind] for kind in KINDS if kinds[kind]})

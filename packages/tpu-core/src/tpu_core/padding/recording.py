"""What two recordings of one program have in common, and the integers in which they may differ."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from tpu_core.compiler.segment import Node, Segment
from tpu_core.lowering.dtypes import dtype_text
from tpu_core.lowering.views import Access
from tpu_core.recorder.plan import Blank, NodePlan, Number, Operand, Repeated, _Written


def describe(segment: Segment) -> tuple[str, list[int]]:
    """A process-stable key of the segment without its sizes, and the sizes in a fixed order.

    Shapes of the values come first, so that symbols are sizes of inputs where possible.
    """
    integers = [n for s in segment.slots for n in s.shape]
    digest = hashlib.sha256()
    # Dims of size 1 are broadcast and empty ones have no elements: those are other programs.
    slots = [(s.is_input, dtype_text(s.dtype), [min(n, 2) for n in s.shape]) for s in segment.slots]
    packs = [n.pack for n in segment.numbers]
    digest.update(repr((slots, packs, segment.live, segment.donated)).encode())
    for node in segment.nodes:
        form, numbers = _node(node)
        digest.update(form.encode())
        digest.update(repr((node.operands, node.outputs, node.numbers)).encode())
        integers += numbers
    return digest.hexdigest(), integers


def _node(node: Node) -> tuple[str, tuple[int, ...]]:
    return ("uninitialised", ()) if node.plan is None else _plan(node.plan)


@functools.lru_cache(maxsize=16384)
def _plan(plan: NodePlan) -> tuple[str, tuple[int, ...]]:
    form = [plan.op, plan.precision, str(plan.choices), str(plan.random), str(plan.order)]
    integers: list[int] = []

    def walk(value: Any) -> None:
        if isinstance(value, bool) or value is None:
            form.append(str(value))
        elif isinstance(value, (int, np.integer)):
            form.append("i")
            integers.append(int(value))
        elif isinstance(value, (list, tuple)):
            form.append(f"[{len(value)}")
            for v in value:
                walk(v)
        elif isinstance(value, Operand):
            form.append(f"o{value.index}")
        elif isinstance(value, Number):
            form.append(f"n{value.dtype}")
        elif isinstance(value, Repeated):
            form.append(f"r{value.count}")
        elif isinstance(value, Blank):
            form.append(f"b{dtype_text(value.aval.dtype)}")
            walk(value.aval.shape)
        elif isinstance(value, _Written):
            form.append("w")
            walk(value.read)
        elif isinstance(value, Access):
            base, dtype = dtype_text(value.base_dtype), dtype_text(value.dtype)
            form.append(f"a{value.form}{base}{dtype}{value.dims}")
            form.append(f"{value.overwrites}{value.chained}")
            walk((value.base_sizes, value.base_strides, value.sizes, value.strides, value.offset))
        else:
            form.append(repr(value))

    for name, keyword, value in plan.template:
        form.append(f"{name}{keyword}")
        walk(value)
    walk([*plan.reads, *plan.writes])
    return "|".join(form), tuple(integers)

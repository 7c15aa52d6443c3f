"""Difference between segments of the same ops that keeps one program from serving both."""

from __future__ import annotations

from typing import Any

from tpu_core.compiler.segment import Node, Segment
from tpu_core.dtypes import dtype_text
from tpu_core.lowering.views import WHOLE, Access
from tpu_core.padding.recording import form_of_node, reused, sizes_of_node
from tpu_core.recorder.plan import PLACES, NodePlan


def form_difference(earlier: Segment, later: Segment) -> str | None:
    """Reason that two segments are no recordings of one program with several sizes.

    Args:
        earlier: A segment that ran before.
        later: The segment that is to be compiled.

    Returns:
        The first difference that is no size, as a clause; None where the ops are others, or nothing
        but sizes differs.

    Example:
        >>> form_difference(segment, other)
        "aten.rot90.default has k = 3, earlier 1, which is no size"
    """
    if [n.name for n in earlier.nodes] != [n.name for n in later.nodes]:
        return None
    for a, b in zip(earlier.nodes, later.nodes):
        if form_of_node(a) != form_of_node(b):
            return _of_nodes(a, b)
        if (a.operands, a.outputs) != (b.operands, b.outputs):
            return f"{b.name} uses results of other ops"
    for x, y in zip(earlier.slots, later.slots):
        if x.dtype != y.dtype or len(x.shape) != len(y.shape):
            return None
        for before, now in zip(x.shape, y.shape):
            if min(before, 2) != min(now, 2):
                special = min(before, now)
                return f"a dim of size {special} makes another program than larger ones"
    for a, b in zip(earlier.nodes, later.nodes):
        if any((x == 1) != (y == 1) for x, y in zip(sizes_of_node(a)[0], sizes_of_node(b)[0])):
            return "a dim of size 1 makes another program than larger ones"
    if earlier.live != later.live:
        return "other results are read later"
    if reused(earlier) != reused(later):
        return "memory of other inputs can be reused"
    return None


def _of_nodes(earlier: Node, later: Node) -> str:
    a, b = earlier.plan, later.plan
    if isinstance(a, NodePlan) and isinstance(b, NodePlan):
        for (name, _, before), (other, _, now) in zip(a.template, b.template):
            if name != other or name in b.sizes:
                continue
            if _is_list_of_tensors(before) and _is_list_of_tensors(now):
                if len(before) != len(now):
                    return f"{later.name} has {len(now)} {name}, earlier {len(before)}"
            elif _is_constant(before) and _is_constant(now) and repr(before) != repr(now):
                name = name.lstrip("$")
                return f"{later.name} has {name} = {now}, earlier {before}, which is no size"
        for x, y in zip([*a.reads, *a.writes], [*b.reads, *b.writes]):
            if difference := _of_accesses(x, y):
                return f"{later.name} has {difference}"
    return f"{later.name} has other arguments or dtypes"


def _of_accesses(earlier: Access, later: Access) -> str | None:
    before, now = dtype_text(earlier.dtype), dtype_text(later.dtype)
    if before != now:
        return f"a tensor of {now}, earlier of {before}"
    before, now = (f"{len(a.sizes)} dims" for a in (earlier, later))
    if before != now:
        return f"a tensor of {now}, earlier of {before}"
    if earlier.form == later.form and earlier.dims == later.dims:
        return None
    before, now = ("a whole tensor" if a.form == WHOLE else "a view" for a in (earlier, later))
    return f"{now}, earlier {before}" if before != now else "a view of another kind"


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, PLACES) for v in value)


def _is_constant(value: Any) -> bool:
    return not isinstance(value, PLACES) and not _is_list_of_tensors(value)

"""Selection of the nodes to check, and the errors that words stand for; see `lowering.checks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tpu_core import _C
from tpu_core.config import config
from tpu_core.dtypes import dtype_text
from tpu_core.lowering import checks
from tpu_core.lowering.checks import CHECKS, Findings
from tpu_core.lowering.registry import REGISTRY
from tpu_core.lowering.views import WHOLE, Access
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import jax_settings
from tpu_core.recorder import compute
from tpu_core.recorder.plan import NodePlan, Operand

LEVELS = {"off": checks.OFF, "default": checks.DEFAULT, "all": checks.ALL}

# Give the names of the ops that a node stands for, from its plan.
_GRAPHS: dict[str, Callable[[NodePlan], Sequence[str]]] = {}


def choose() -> None:
    """Tell the extension what the configuration says."""
    switch(config().checks)


def switch(name: str) -> None:
    """Have other ops checked from the next one on.

    Args:
        name: As of ``TPU_CHECKS``.
    """
    _C.set_checks(LEVELS[name])


def stands_for(op: str, ops: Callable[[NodePlan], Sequence[str]]) -> None:
    """Declare an op that stands for others; its node is checked where one of them has a check.

    Args:
        op: Name of the overload.
        ops: Names of the others, from a plan of the op.
    """
    _GRAPHS[op] = ops


def may_check(entry: Any, is_decomposed: bool) -> bool:
    """True if calls of an overload may be checked, as far as its name says.

    Args:
        entry: Its lowering, or None.
        is_decomposed: Whether it is taken apart by PyTorch.
    """
    return is_decomposed or (entry is not None and (entry.op in CHECKS or entry.op in _GRAPHS))


def level_of(node: NodePlan) -> int:
    """At which level a node is to be checked; 0 where it has nothing to check."""
    level = _C.checks()
    if not level:
        return checks.OFF
    of_graph = _GRAPHS.get(node.compute.op)
    if of_graph is not None:
        return level if any(checks.has_check(op, level) for op in of_graph(node)) else checks.OFF
    if isinstance(node.compute, compute.LoweringCompute):
        entry = CHECKS.get(node.compute.op)
        has_check = entry is not None and entry.level <= level and entry.applies(node)
    else:
        has_check = any(checks.has_check(op, level) for op in node.compute.ops)
    return level if has_check else checks.OFF


def _findings(node: NodePlan, packs: Sequence[int], level: int) -> Findings:
    operands = [jax.ShapeDtypeStruct(a.base_sizes, a.base_dtype) for a in node.reads]
    chained = (a for a in node.writes if not a.overwrites and a.chained < 0)
    operands += [jax.ShapeDtypeStruct(a.base_sizes, a.base_dtype) for a in chained]
    seeds = [np.int32] * (4 if node.random else 0)
    dtypes = [*(pjrt.PACK_DTYPES[k] for k in packs), *seeds]
    numbers = [jax.ShapeDtypeStruct((), d) for d in dtypes]
    kept: list[Findings] = []

    def lower(operands: list[Any], numbers: list[Any]) -> None:
        kept.append(node.checked(operands, map(pjrt.weak, numbers), level)[1])

    with jax_settings.lowering():
        jax.eval_shape(lower, operands, numbers)
    return kept[-1]


def failure(plan: NodePlan, packs: Sequence[int], code: int, value: int, line: str) -> Exception:
    """The error that a word stands for.

    Args:
        plan: Of the node that is to blame.
        packs: Index of the pack of each of its numbers.
        code: Its check, counted from 1.
        value: The offending integer.
        line: The user's line.
    """
    op, avals, finding = _findings(plan, packs, plan.checks).found[code - 1]
    error = finding.error(value)
    shapes = ", ".join(f"{dtype_text(np.dtype(a.dtype))}{list(a.shape)}" for a in avals)
    where = f" at {line}" if line else ""
    error.add_note(f"in {op.removesuffix('.default')}({shapes}){where}, found by its program")
    return error


def read(words: list[Any]) -> list[tuple[int, int]]:
    """Read words that are not on the host; waits for them."""
    from tpu_core.pjrt import padded_array as arrays

    for word in words:
        if hasattr(word, "copy_to_host_async"):
            word.copy_to_host_async()
    found = (np.asarray(arrays.on_host(word)) for word in words)
    return [(int(code), int(value)) for code, value in found]


def combination(count: int) -> NodePlan:
    """The plan of the node that makes one word of several."""
    entry = REGISTRY.get("tpu.combine_words.default")
    assert entry is not None
    (size,), dtype = checks.WORD.shape, checks.WORD.dtype
    access = Access(WHOLE, dtype, (size,), (1,), dtype, (size,), (1,), 0, (), False, -1)
    return NodePlan(
        entry.op,
        [("words", False, [Operand(i) for i in range(count)])],
        [access] * count,
        [],
        compute.LoweringCompute(entry, (checks.WORD,), ()),
        [0],
        False,
        "highest",
    )

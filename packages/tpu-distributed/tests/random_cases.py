"""Random collectives: what a case is, and a list of them that every rank draws alike.

A case says all that its tensors depend on, so that each rank computes what every rank gives and
what comes of it by itself, and a case that failed can be run alone: its ``repr`` is Python.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

REDUCE_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR")
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")

REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "reduce_scatter_tensor",
    "all_reduce_coalesced",
    "coalescing_manager",
    "functional_all_reduce",
    "functional_reduce_scatter",
)
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single_uneven",
    "send_recv",
    "batch_isend_irecv",
    "functional_all_gather",
    "functional_all_to_all",
)
OTHERS = ("all_gather_object", "broadcast_object_list", "scatter_object_list", "barrier")
KINDS = (*REDUCING, *MOVING, *OTHERS)
# In these ranks do different things, or hold different shapes.
UNLIKE = frozenset(
    {"reduce", "gather", "scatter", "send_recv", "all_to_all", "functional_all_to_all"}
    | {kind for kind in KINDS if kind.endswith("_uneven")}
)

# Of tensors that are given and written; the memory around a part must stay as it is.
LAYOUTS = ("plain", "computed", "transposed", "strided", "part")
SHAPES = ((), (1,), (5,), (2, 3), (4, 2), (3, 1, 2), (0, 3), (37,), (300,), (17, 19))


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        kind: One of `KINDS`.
        group: Its number among the groups of the run.
        shape: Of one rank's part.
        dtype: Name of the dtype.
        op: Name of the reduce op.
        root: Source or destination: a number from which that follows in a group of any size.
        given: Layout of what is read.
        written: Layout of what is written.
        asynchronous: Whether it is called with ``async_op``.
        overwrites: Whether what is read is overwritten as soon as the call has returned.
        seed: Of the numbers.
    """

    kind: str
    group: int = 0
    shape: tuple[int, ...] = (2, 3)
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0
    given: str = "plain"
    written: str = "plain"
    asynchronous: bool = False
    overwrites: bool = False
    seed: int = 0


def drawn(seed: int, count: int, groups: int, variants: int) -> Iterator[Case]:
    """Cases, the same for the same arguments.

    Args:
        seed: Of the choice.
        count: Number of cases.
        groups: Number of groups.
        variants: How many kinds of case there are, where numbers and ``async_op`` make no
            difference: few of them need few programs.
    """
    choice = random.Random(seed)
    pool = [_variant(choice, KINDS[i % len(KINDS)], groups) for i in range(variants)]
    for i in range(count):
        case = pool[i] if i < variants else choice.choice(pool)
        yield replace(
            case,
            asynchronous=choice.random() < 0.6,
            overwrites=choice.random() < 0.3,
            seed=choice.randrange(1_000_000),
        )


def _variant(choice: random.Random, kind: str, groups: int) -> Case:
    dtype, op = choice.choice(DTYPES), "SUM"
    if kind in REDUCING:
        op = choice.choice([op for op in REDUCE_OPS if defined(op, dtype)])
    return Case(
        kind,
        choice.randrange(groups),
        choice.choice(SHAPES),
        dtype,
        op,
        choice.randrange(12),
        choice.choice(LAYOUTS),
        choice.choice([layout for layout in LAYOUTS if layout != "computed"]),
    )


def defined(op: str, dtype: str) -> bool:
    """Whether a reduce op takes a dtype."""
    if op == "PREMUL_SUM":
        return dtype in FLOATS
    if op.startswith("B"):
        return dtype not in FLOATS
    return not (dtype == "bool" and op == "AVG")

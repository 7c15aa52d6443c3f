"""The op of a segment that makes the first NaN or infinity (``TPU_DEBUG_NANS=1``).

A program is checked as a whole: its outputs, once it has run. Where one is not finite, the segment
is replayed op by op from its inputs, and the value is followed back to the op that made it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpu_core.compiler.replay import Value, all_values
from tpu_core.compiler.segment import Node, Segment
from tpu_core.errors import NonFiniteError
from tpu_core.verification.host_call import HostCall, call_of
from tpu_core.verification.statistics import kind, non_finite, statistics

_INSIDE = (
    "The ops inside are not looked at: run the code without torch.compile "
    "(TORCH_COMPILE_DISABLE=1) to see which it is."
)


def error_of_call(
    name: str, line: str, result: torch.Tensor, call: HostCall | None
) -> NonFiniteError | None:
    """The error of an op that made a NaN, or an infinity that its arguments do not hold.

    Args:
        name: The op.
        line: The user's line.
        result: One of its results, on the CPU.
        call: The call, where that is known.

    Returns:
        None where the result is finite, or infinite as the arguments are.
    """
    nans, infinities = non_finite(result)
    if nans == infinities == 0:
        return None
    arguments = dict(call.tensors()) if call else {}
    numbers = {
        key: value
        for key, value in (call.arguments.items() if call else ())
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    # A mask of -inf is meant to be one.
    given = [*arguments.values(), *(torch.tensor(float(n), device="cpu") for n in numbers.values())]
    if nans == 0 and any(non_finite(t)[1] for t in given):
        return None
    kinds = [f"{n} {k}" for n, k in ((nans, "NaN"), (infinities, "infinite")) if n]
    return NonFiniteError(
        f"{name} produced {' and '.join(kinds)} of {result.numel()} values.",
        values={
            "result": kind(result),
            **{f"input {key}": statistics(t) for key, t in arguments.items()},
            **{f"input {key}": value for key, value in numbers.items()},
        },
        line=line or None,
        remedy=None if name.startswith("aten.") else _INSIDE,
    )


def error_of_segment(
    segment: Segment,
    inputs: Sequence[Value],
    numbers: Sequence[float | int],
    found: Sequence[Value],
) -> NonFiniteError | None:
    """The error of a program's run whose outputs are not finite.

    Args:
        segment: The segment that the program was made for.
        inputs: Values of its input slots before the run, on the CPU.
        numbers: Its numbers in the run.
        found: Its outputs, on the CPU.

    Returns:
        None where all is finite, or as infinite as its inputs and numbers make it.
    """
    suspects = [i for i, value in zip(segment.live, found) if any(non_finite(value))]
    if not suspects:
        return None
    values = all_values(segment, inputs, numbers)
    makers = {slot: node for node in segment.nodes for slot in node.outputs if slot is not None}
    for slot in suspects:
        node = _origin(slot, values, makers)
        if node is None:
            continue
        operands = [values[i] for i in node.operands]
        call = call_of(node, operands, numbers[node.numbers :])
        for value in (values[i] for i in node.outputs if i in values):
            error = error_of_call(node.name, node.line, value, call)
            if error is not None:
                return error
    unexplained = [i for i in suspects if i in makers and not any(non_finite(values[i]))]
    if unexplained:
        return _of_program_alone(segment, makers[unexplained[0]])
    return None


def _origin(slot: int, values: dict[int, Value], makers: dict[int, Node]) -> Node | None:
    """The node that made what is not finite in a slot: none of its operands is so in that way."""
    if not any(non_finite(values[slot])):
        return None  # the ops one by one are finite there
    node = None
    while slot in makers:
        node = makers[slot]
        kinds = 0 if non_finite(values[slot])[0] else 1
        earlier = [i for i in node.operands if i in makers and non_finite(values[i])[kinds]]
        if not earlier:
            break
        slot = earlier[0]
    return node


def _of_program_alone(segment: Segment, node: Node) -> NonFiniteError:
    return NonFiniteError(
        f"A program of {len(segment.nodes)} ops gave a NaN or an infinity for {node.name}, and its "
        "ops one by one do not.",
        line=node.line or None,
        remedy="Values near the dtype's limits overflow in one order of operations and not in "
        "another: look at their range at this line. TPU_VERIFY=first compares all results.",
    )

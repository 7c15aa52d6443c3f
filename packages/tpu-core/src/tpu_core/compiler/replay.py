"""A recorded segment computed op by op on the host: PyTorch's CPU ops, and lowerings where it has
none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu_core import interruptible
from tpu_core.compiler import host_windows as windows
from tpu_core.compiler.cpu_ops import CpuOp, cpu_op
from tpu_core.compiler.segment import Node, Segment
from tpu_core.dtypes import TO_TORCH
from tpu_core.errors import KernelCompilationError
from tpu_core.lowering.evaluate import to_jax, to_torch
from tpu_core.pjrt import jax_settings
from tpu_core.recorder.compute import changing_results, flatten
from tpu_core.recorder.plan import NodePlan

logger = logging.getLogger("tpu_core")

Value = torch.Tensor
# The result of an op that is called again, with its first operand changed by a function.
Again = Callable[[Callable[[Value], Value]], Value]
# Called with the name of an op and each of its results; gives what the ops after it read.
Change = Callable[[str, Value, Again], Value]


def _unchanged(op: str, value: Value, again: Again) -> Value:
    return value


def replay(
    segment: Segment,
    inputs: Sequence[Value],
    numbers: Sequence[float | int],
    change: Change = _unchanged,
    lowers: bool = True,
) -> list[Value]:
    """The results of a segment.

    Args:
        segment: The recorded segment.
        inputs: The values of its input slots, on the CPU; they stay as they are.
        numbers: Its numbers in this run.
        change: Applied to each result of an op, such as one that rounds otherwise; also of those
            inside a graph.
        lowers: Whether an op that the CPU lacks or refuses is computed by its lowering.

    Returns:
        The values of its live slots, in their order.
    """
    values = all_values(segment, inputs, numbers, change, lowers)
    return [values[i] for i in segment.live]


def all_values(
    segment: Segment,
    inputs: Sequence[Value],
    numbers: Sequence[float | int],
    change: Change = _unchanged,
    lowers: bool = True,
) -> dict[int, Value]:
    """The values of all of a segment's slots, those that are not live too.

    Args:
        segment, inputs, numbers, change, lowers: As of `replay`.
    """
    values: dict[int, Value] = dict(zip(segment.inputs(), inputs, strict=True))
    with _plain_calls():
        for node in segment.nodes:
            operands = [values[i] for i in node.operands]
            call = partial(_results, segment, node, numbers[node.numbers :], lowers)
            for i, (slot, value) in enumerate(zip(node.outputs, call(operands, change))):
                if slot is not None and value is not None:
                    expected = segment.slots[slot]
                    value = value.reshape(expected.shape).to(TO_TORCH[expected.dtype])
                    again = partial(_again, call, operands, i)
                    values[slot] = change(node.name, value, again)
    return values


def _again(
    call: Callable[[Sequence[Value]], Sequence[Value | None]],
    operands: Sequence[Value],
    result: int,
    alter: Callable[[Value], Value],
) -> Value:
    value = call([alter(operands[0]), *operands[1:]])[result]
    assert value is not None
    return value


@contextmanager
def _plain_calls() -> Iterator[None]:
    """Calls as of a program without modes: a default device, autocast and the like are recorded."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _results(
    segment: Segment,
    node: Node,
    numbers: Sequence[float | int],
    lowers: bool,
    operands: Sequence[Value],
    change: Change = _unchanged,
) -> list[Value | None]:
    if node.plan is None:  # uninitialised memory
        slot = segment.slots[node.outputs[0] or 0]
        return [torch.zeros(slot.shape, dtype=TO_TORCH[slot.dtype], device="cpu")]
    op = cpu_op(node.plan.compute.op)
    if op is not None and _is_plain(node.plan):
        try:
            return _by_cpu(node.plan, op, operands, numbers)
        except Exception as error:  # such as an argument that lowerings alone take
            interruptible.pass_on(error)
            if not lowers:
                raise
            logger.debug("%s has no CPU op for these arguments: %s", node.name, error)

    if not lowers:
        raise NotImplementedError(f"{node.name} has no CPU op.")
    return _by_lowering(node.plan, operands, numbers, change)


def is_cpu_op(plan: NodePlan) -> bool:
    """Return whether the CPU's op computes a node: its arguments say all, and nothing is drawn."""
    return cpu_op(plan.compute.op) is not None and _is_plain(plan)


def _is_plain(plan: NodePlan) -> bool:
    """Return whether the op's arguments say all of what it computes."""
    return (
        not plan.random
        and not plan.identity
        and not plan.choices
        and plan.default_dtype == torch.get_default_dtype()
    )


def _by_cpu(
    plan: NodePlan, op: CpuOp, operands: Sequence[Value], numbers: Sequence[float | int]
) -> list[Value | None]:
    positional, keywords, starts = plan.arguments(
        operands, iter(numbers), windows.read, _number, _blank
    )
    given = dict(zip(plan.positional_names(), positional), **keywords)
    out = flatten(plan.compute.out)
    if op.takes_dtype and given.get("dtype") is None and out[0] is not None:
        dtype = TO_TORCH[out[0].dtype]
        # A norm of complex numbers is real, and takes a complex dtype alone.
        is_norm = not dtype.is_complex and any(
            isinstance(t, torch.Tensor) and t.is_complex() for t in flatten(tuple(positional))
        )
        given["dtype"] = None if is_norm else dtype
    results = op.call(**given)
    flat = flatten(results if isinstance(results, tuple) else (results,))
    flat = [_as_expected(r, e) for r, e in zip(flat, out, strict=True)]
    return _written(plan, [flat[i] for i in plan.order], operands, starts)


def _as_expected(result: Any, expected: Any) -> Any:
    if expected is None:
        return None
    if tuple(result.shape) != tuple(expected.shape):
        raise ValueError(f"{tuple(result.shape)} in place of {tuple(expected.shape)}")
    return result.to(TO_TORCH[expected.dtype])


def _written(
    plan: NodePlan, outputs: list[Any], operands: Sequence[Value], starts: list[list[Any]]
) -> list[Value | None]:
    """The results, with the new values of written storages in place of what is written."""
    fresh = len(outputs) - len(plan.writes)
    written: list[Value] = []
    bases = iter(operands[len(plan.reads) :])
    for access, value, places in zip(plan.writes, outputs[fresh:], starts):
        value = value.to(TO_TORCH[access.dtype])
        if access.overwrites:
            written.append(value)
            continue
        base = written[access.chained] if access.chained >= 0 else next(bases)
        written.append(windows.write(base, access, value, places))
    # A call that the CPU takes is one that the program has nothing to say of.
    word = [torch.zeros(2, dtype=torch.int64, device="cpu")] if plan.checks else []
    return outputs[:fresh] + word + written


def _by_lowering(
    plan: NodePlan, operands: Sequence[Value], numbers: Sequence[float | int], change: Change
) -> list[Value | None]:
    def inside(op: str, results: Any, again: Callable[[Callable[[Any], Any]], Any]) -> Any:
        leaves, tree = jax.tree.flatten(results)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return results

        def result_again(i: int, alter: Callable[[Value], Value]) -> Value:
            altered = again(lambda operand: to_jax(alter(to_torch(operand))))
            return to_torch(jax.tree.leaves(altered)[i])

        changed = [
            to_jax(change(op, to_torch(leaf), partial(result_again, i)))
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, changed)

    changing = changing_results(None if change is _unchanged else inside)
    with changing, jax_settings.lowering(), KernelCompilationError.raising():
        results = plan.lower([to_jax(o) for o in operands], iter(numbers))
    return [None if r is None else to_torch(r) for r in results]


def _number(number: float | int, dtype: Any) -> Value:
    return torch.tensor(number, dtype=TO_TORCH[dtype], device="cpu")


def _blank(shape: tuple[int, ...], dtype: Any) -> Value:
    return torch.zeros(shape, dtype=TO_TORCH[dtype], device="cpu")

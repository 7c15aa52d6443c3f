"""Collectives whose parts differ in size from rank to rank: padded to the longest.

Every rank runs the same program, as a TPU wants it; what is beyond a part's end is cut off after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_distributed.control import Call
from tpu_distributed.reductions import Reduction
from tpu_distributed.stablehlo import Program, Value
from tpu_distributed.values import write
from tpu_distributed.work import Issued

if TYPE_CHECKING:
    from tpu_distributed.group import Group

Tensors = Sequence[torch.Tensor]


def all_gather(group: Group, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> Issued:
    """Inputs of different sizes to all ranks; each rank knows the sizes by its outputs."""
    arrays: list[Any] = []
    for outs, x in zip(outputs, inputs):
        longest = max(o.numel() for o in outs)
        call = Call("all_gather", "uneven", tuple((tuple(o.shape), o.dtype) for o in outs))

        def build(p: Program, xs: list[Value]) -> list[Value]:
            gathered = p.all_gather(xs[0])
            return [p.row(gathered, i) for i in range(p.size)]

        results = group.run(call, [_padded(x, longest)], build, _seconds(options))
        for out, array in zip(outs, results):
            _write_start(out, array)
        arrays += results
    return Issued([o for outs in outputs for o in outs], arrays)


def reduce_scatter(
    group: Group, outputs: Tensors, inputs: Sequence[Tensors], options: Any
) -> Issued:
    """Items of different sizes; each rank knows the sizes by its inputs."""
    reduction = Reduction.of(options.reduceOp)
    arrays: list[Any] = []
    for out, xs in zip(outputs, inputs):
        longest = max(x.numel() for x in xs)
        shapes = tuple((tuple(x.shape), x.dtype) for x in xs)
        call = Call("reduce_scatter", f"{reduction} uneven", shapes)

        def build(p: Program, rows: list[Value]) -> list[Value]:
            return [reduction.reduce_scatter(p, p.stack(rows))]

        rows = [_padded(x, longest) for x in xs]
        results = group.run(call, rows, build, _seconds(options))
        _write_start(out, results[0])
        arrays += results
    return Issued(outputs, arrays)


def all_to_all_single(
    group: Group,
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    options: Any,
) -> Issued:
    """Parts of given sizes in the first dim."""
    size = group.size
    sizes = list(input_sizes) or [input.shape[0] // size] * size
    wanted = list(output_sizes) or [output.shape[0] // size] * size
    outs = list(output.detach().split(wanted))
    work = all_to_all(group, outs, list(input.split(sizes)), options)
    return Issued([output], work.arrays)


def all_to_all(group: Group, outputs: Tensors, inputs: Tensors, options: Any) -> Issued:
    """Input ``i`` to rank ``i``; only the two of them know its size."""
    dtype = inputs[0].dtype
    call = Call("all_to_all", "uneven", (((), dtype),))
    record = group.control.agree(call, _seconds(options))
    own = torch.tensor([max(t.numel() for t in (*inputs, *outputs))])
    longest = own
    if group.size > 1:
        everyone = torch.zeros(group.size, dtype=torch.int64)
        group.control.exchange(own, everyone, record, _seconds(options))
        longest = everyone.max()
    length = int(longest)
    if length == 0:
        record.finish()
        return Issued(outputs)
    parts = Call("all_to_all", "uneven", (((group.size, length), dtype),))

    def build(p: Program, rows: list[Value]) -> list[Value]:
        exchanged = p.all_to_all(p.stack(rows))
        return [p.row(exchanged, i) for i in range(p.size)]

    rows = [_padded(x, length) for x in inputs]
    arrays = group.run(parts, rows, build, agreed=record)
    for out, array in zip(outputs, arrays):
        _write_start(out, array)
    return Issued(outputs, arrays)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    flat = x.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, length - flat.numel()))


def _write_start(out: torch.Tensor, array: Any) -> None:
    """Write as much of a 1-d array as a tensor has elements."""
    if out.numel() == 0:
        return
    padded = torch.empty(array.shape, dtype=out.dtype, device=out.device)
    write(padded, array)
    out.detach().copy_(padded[: out.numel()].view(out.shape))


def _seconds(options: Any) -> float | None:
    seconds = options.timeout.total_seconds()
    return seconds if seconds > 0 else None

"""Ragged collectives: parts of different sizes, padded to the longest.

Every rank runs the same program, as a TPU wants it; what is beyond a part's end is cut off after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tpu_distributed import split_sizes
from tpu_distributed.reductions import Reduction
from tpu_distributed.rendezvous import CollectiveCall
from tpu_distributed.stablehlo import ProgramWriter, Value
from tpu_distributed.work import CompletedWork

if TYPE_CHECKING:
    from tpu_distributed.group import Group

Tensors = Sequence[torch.Tensor]


def all_gather(
    group: Group, outputs: Sequence[Tensors], inputs: Tensors, timeout: float | None
) -> CompletedWork:
    """Inputs of different sizes to all ranks; each rank knows the sizes by its outputs."""
    for outs, x in zip(outputs, inputs):
        longest = max(o.numel() for o in outs)
        call = CollectiveCall(
            "all_gather", "uneven", tuple((tuple(o.shape), o.dtype) for o in outs)
        )

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            gathered = p.all_gather(xs[0])
            return [p.row(gathered, i) for i in range(p.size)]

        padded = [x.new_empty(longest) for _ in outs]
        group.run(call, [_padded(x, longest)], build, padded, timeout=timeout)
        for out, whole in zip(outs, padded):
            _write_start(out, whole)
    return CompletedWork([o for outs in outputs for o in outs])


def reduce_scatter(
    group: Group,
    outputs: Tensors,
    inputs: Sequence[Tensors],
    reduction: Reduction,
    timeout: float | None,
) -> CompletedWork:
    """Items of different sizes; each rank knows the sizes by its inputs."""
    for out, xs in zip(outputs, inputs):
        longest = max(x.numel() for x in xs)
        shapes = tuple((tuple(x.shape), x.dtype) for x in xs)
        call = CollectiveCall("reduce_scatter", f"{reduction} uneven", shapes)

        def build(p: ProgramWriter, rows: list[Value]) -> list[Value]:
            return [reduction.reduce_scatter(p, p.stack(rows))]

        rows = [_padded(x, longest) for x in xs]
        padded = out.new_empty(longest)
        group.run(call, rows, build, [padded], timeout=timeout)
        _write_start(out, padded)
    return CompletedWork(outputs)


def all_to_all_single(
    group: Group,
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    timeout: float | None,
) -> CompletedWork:
    """Parts of given sizes in the first dim."""
    size = group.size
    sizes = list(input_sizes) or [input.shape[0] // size] * size
    wanted = list(output_sizes) or [output.shape[0] // size] * size
    try:
        if len(sizes) != size or len(wanted) != size:
            raise ValueError(f"all_to_all_single: a group of {size} ranks has {size} split sizes.")
        outs, parts = list(output.detach().split(wanted)), list(input.split(sizes))
    except (RuntimeError, ValueError) as error:
        group.refuse("all_to_all_single", error, timeout)
    all_to_all(group, outs, parts, timeout)
    return CompletedWork([output])


def all_to_all(
    group: Group, outputs: Tensors, inputs: Tensors, timeout: float | None
) -> CompletedWork:
    """Input ``i`` to rank ``i``; only the two of them know its size.

    Raises:
        CollectiveMismatchError: A rank sends as many elements as another does not expect.
    """
    dtype = inputs[0].dtype
    call = CollectiveCall("all_to_all", "uneven", (((), dtype),))
    # Of the parts with elements: the longest, and whom the only one is for, or -1.
    given = [i for i, x in enumerate(inputs) if x.numel()]
    longest = max(t.numel() for t in (*inputs, *outputs))
    sizes = split_sizes.Sizes.of(inputs, outputs)
    sent, expected = sizes.fingerprints(group.rank)
    own = np.array([longest, given[0] if len(given) == 1 else -1, sent, expected])
    record, gathered = group.agree(call, timeout, own)
    plans = np.array(gathered or [own])
    if plans[:, 2].sum() != plans[:, 3].sum():
        raise group.control.splits_differ(record, sizes)
    length, to = int(plans[:, 0].max()), plans[:, 1].tolist()
    if length == 0:
        record.finish()
        return CompletedWork(outputs)
    written = outputs
    if sorted(to) == list(range(group.size)):
        # One part from each and one to each, as in a ring: the others are not padded and sent.
        inputs, written = [inputs[to[group.rank]]], [outputs[to.index(group.rank)]]

        def build(p: ProgramWriter, rows: list[Value]) -> list[Value]:
            return [p.permute(rows[0], to)]

        detail = f"of one part each, to {', '.join(map(str, to))}"
    else:

        def build(p: ProgramWriter, rows: list[Value]) -> list[Value]:
            exchanged = p.all_to_all(p.stack(rows))
            return [p.row(exchanged, i) for i in range(p.size)]

        detail = "uneven"
    parts = CollectiveCall("all_to_all", detail, (((len(inputs), length), dtype),))
    rows = [_padded(x, length) for x in inputs]
    padded = [x.new_empty(length) for x in rows]
    group.run(parts, rows, build, padded, agreed=record)
    for out, whole in zip(written, padded):
        _write_start(out, whole)
    return CompletedWork(outputs)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    flat = x.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, length - flat.numel()))


def _write_start(out: torch.Tensor, values: torch.Tensor) -> None:
    """Write as much of a 1-d tensor as another has elements."""
    out.detach().copy_(values[: out.numel()].view(out.shape))

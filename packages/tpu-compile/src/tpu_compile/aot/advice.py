"""Advice that makes a program smaller or faster on a TPU, from its graph, its HLO and its costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile.aot.costs import Cost
from tpu_compile.aot.plan import Input
from tpu_core.errors import format_bytes

_LANES = 128
# Below this share of the memory, or of the cycles, a matter is not worth a line.
_SHARE = 0.01
_IDLE = 0.1
_SOFTMAX = ("_softmax", "_safe_softmax")


def advise(
    graphs: Sequence[GraphModule],
    inputs: Sequence[Input],
    outputs: Sequence[tuple[str, tuple[int, ...], str]],
    cost: Cost | None,
    capacity: int,
) -> list[str]:
    """Advice, the weightiest first.

    Args:
        graphs: The traced program and the scanned layers in it.
        inputs: The program's.
        outputs: Name, shape and dtype of those results that replace no input.
        cost: Its price.
        capacity: Bytes of HBM of a device.
    """
    lines = [*_float32(cost), *_head_dims(graphs), *_padding(inputs, capacity)]
    return [*lines, *_donation(inputs, outputs, capacity), *_idle(cost)]


def _float32(cost: Cost | None) -> Iterator[str]:
    if cost is None or cost.float32_share < 0.5:
        return
    passes = cost.mxu_flops / cost.product_flops
    yield (
        f"{cost.float32_share:.0%} of the products are of float32"
        + (f", at {passes:.0f} passes of the matrix unit each" if passes > 1.5 else "")
        + ". bfloat16 halves the bytes: model.to(torch.bfloat16), or torch.autocast('tpu', "
        "torch.bfloat16). torch.set_float32_matmul_precision('medium') takes one pass."
    )


def _head_dims(graphs: Sequence[GraphModule]) -> Iterator[str]:
    found = {dim for graph in graphs for node in graph.graph.nodes for dim in _head_dim(node)}
    for dim in sorted(d for d in found if d < _LANES or d % _LANES):
        yield (
            f"Attention heads of {dim} elements fill {dim / (-dim // _LANES * -_LANES):.0%} of the "
            f"matrix unit's {_LANES} lanes. Fewer heads of {_LANES} cost the same parameters."
        )


def _head_dim(node: Node) -> Iterator[int]:
    name = str(node.target)
    if "scaled_dot_product" in name and "backward" not in name:
        query: Any = node.args[0]
        yield int(query.meta["val"].shape[-1])
    if name.split(".")[1:2] != [] and name.split(".")[1] in _SOFTMAX:
        product = _source(node)
        if product is not None:
            left: Any = product.args[0]
            yield int(left.meta["val"].shape[-1])


def _source(node: Node) -> Node | None:
    """The batched product whose scores a softmax takes, through masks and scales."""
    current: Any = node.args[0]
    for _ in range(12):
        if not isinstance(current, Node) or not current.args:
            return None
        if current.target is torch.ops.aten.bmm.default:
            return current
        ahead = [a for a in current.all_input_nodes if a.meta["val"].dim() >= 2]
        scores = [a for a in ahead if a.meta["val"].shape[-2:] == current.meta["val"].shape[-2:]]
        current = next(iter(scores or ahead), None)
    return None


def _padding(inputs: Sequence[Input], capacity: int) -> Iterator[str]:
    lost = [i for i in inputs if i.padded_bytes - i.bytes > capacity * _SHARE]
    for item in sorted(lost, key=lambda i: i.bytes - i.padded_bytes)[:4]:
        yield (
            f"{item.kind} {item.name} {list(item.shape)} pads badly to tiles of (8, 128): "
            f"{item.waste:.0%} of its {format_bytes(item.padded_bytes)} a device is padding."
        )


def _donation(
    inputs: Sequence[Input], outputs: Sequence[tuple[str, tuple[int, ...], str]], capacity: int
) -> Iterator[str]:
    free = [i for i in inputs if i.kind == "batch"]
    for name, shape, dtype in outputs:
        twin = next((i for i in free if i.shape == shape and i.dtype == dtype), None)
        if twin is not None and twin.bytes > capacity * _SHARE:
            free.remove(twin)
            yield (
                f"{name} could take the memory of {twin.name} ({format_bytes(twin.bytes)} a "
                f"device): write it in place (x.copy_(new), cache[...] = new)."
            )


def _idle(cost: Cost | None) -> Iterator[str]:
    for name, share in (cost.idle if cost else ())[:3]:
        if share >= _IDLE:
            yield (
                f"{name} leaves the matrix unit idle for {share:.0%} of the step, by libtpu's "
                f"estimate of cycles."
            )

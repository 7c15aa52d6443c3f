"""Indices out of range. On the device they are clamped in silence, so Debug mode looks at them.

A cheap test on the host says whether an op's indices can be wrong at all. If so, the op is run on
the CPU with the same arguments, which raises PyTorch's own error or finds that all is well
(``ignore_index``, negative indices that count from the end).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpu_core.extend import ExecutedOp

Arguments = dict[str, Any]
# The index tensors of a call, each with the number of elements it selects from.
Bounds = Callable[[Arguments], Iterator[tuple[torch.Tensor, int]]]


def _along_dim(args: Arguments) -> Iterator[tuple[torch.Tensor, int]]:
    x = args["self"]
    yield args["index"], x.shape[args["dim"]] if x.dim() else 1


def _each_dim(args: Arguments) -> Iterator[tuple[torch.Tensor, int]]:
    for index, size in zip(args["indices"], args["self"].shape):
        if index is not None:
            yield index, size


def _flat(args: Arguments) -> Iterator[tuple[torch.Tensor, int]]:
    yield args["index"], args["self"].numel()


def _rows(args: Arguments) -> Iterator[tuple[torch.Tensor, int]]:
    yield args["indices"], args["weight"].shape[0]


def _classes(args: Arguments) -> Iterator[tuple[torch.Tensor, int]]:
    x = args["self"]
    yield args["target"], x.shape[1] if x.dim() > 1 else x.shape[0]


_BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(
        (
            "gather",
            "scatter",
            "scatter_add",
            "scatter_reduce",
            "index_select",
            "index_add",
            "index_copy",
            "index_fill",
            "index_reduce",
        ),
        _along_dim,
    ),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _each_dim),
    **dict.fromkeys(("take", "put"), _flat),
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _rows),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _classes),
}


def check_indices(segment: Any, inputs: list[Any]) -> None:
    """Raise where the op of a one-op segment was given an index out of range.

    Args:
        segment: The segment.
        inputs: Arrays of its input slots.

    Raises:
        IndexError: PyTorch's own, with the user's line as a note. A few ops raise RuntimeError.
    """
    node = segment.nodes[-1]
    bounds = _BOUNDS.get(node.name.split(".")[1].rstrip("_") if node.plan else "")
    if bounds is None:
        return
    call = ExecutedOp(segment, inputs).call()
    if call is None or not any(_suspicious(i, size) for i, size in bounds(call.arguments)):
        return
    try:
        call.run()
    except (IndexError, RuntimeError) as error:
        if node.line:
            error.add_note(f"at {node.line}")
        raise


def _suspicious(index: torch.Tensor, size: int) -> bool:
    if index.numel() == 0 or index.dtype is torch.bool or index.is_floating_point():
        return False
    return bool(index.min() < 0 or index.max() >= size)

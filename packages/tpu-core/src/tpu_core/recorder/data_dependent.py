"""Ops whose output shape depends on values: the host looks at the values, the device does the rest.

Each call is a host sync, counted with its reason. Only what decides the shape travels: for
``x[mask]`` the mask, never ``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_core import _C
from tpu_core.recorder import fallback
from tpu_core.recorder.functional_variants import overload_name

Handler = Callable[[torch._ops.OpOverload, tuple[Any, ...]], Any]
aten = torch.ops.aten


def _host(t: torch.Tensor, reason: str) -> torch.Tensor:
    return _C.read_tensor(t, reason)


def _nonzero(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    (x,) = args
    return _host(x, "nonzero").nonzero().to(x.device)


def _masked_select(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    x, mask = args
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    mask, x = torch.broadcast_tensors(mask, torch.atleast_1d(x))  # in this order PyTorch names them
    return aten.index.Tensor(x, _expand_masks([mask]))


def _index(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    x, indices = args
    _check_masks(x, indices)
    return op(x, _expand_masks(indices))


def _index_put(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    x, indices, *rest = args
    _check_masks(x, indices)
    return op(x, _expand_masks(indices), *rest)


def _check_masks(x: torch.Tensor, indices: Any) -> None:
    """PyTorch's own complaint where a mask does not fit (TensorAdvancedIndexing.cpp)."""
    dim = 0
    for i in indices:
        if i is None or i.dtype not in (torch.bool, torch.uint8):
            dim += 1
            continue
        for k, n in enumerate(i.shape):
            if dim + k >= x.dim() or x.shape[dim + k] != n:
                raise IndexError(
                    f"The shape of the mask {list(i.shape)} at index {k} does not match the shape "
                    f"of the indexed tensor {list(x.shape)} at index {dim + k}"
                )
        dim += i.dim()


def _expand_masks(indices: Any) -> list[torch.Tensor | None]:
    """Masks replaced by the integer indices of their true elements."""
    expanded: list[torch.Tensor | None] = []
    for i in indices:
        if i is not None and i.dtype in (torch.bool, torch.uint8):
            host = _host(i, "boolean mask index") if i.device.type == "tpu" else i
            expanded.extend(host.nonzero().unbind(1))
        else:
            expanded.append(i)
    # The device takes CPU index tensors and moves them itself.
    return expanded


def _repeat_interleave(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    repeats, output_size = args
    host = _host(repeats, "repeat_interleave")
    return op(host, output_size=output_size).to(repeats.device)


def _on_host(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    """Ops of which the whole input decides the shape: computed on the host, with no warning."""
    return fallback.compute_on_host(op, args, reason=overload_name(op).split(".")[1])


_SPARSE = 9  # the argument `sparse` of aten::_embedding_bag_backward


def _sparse_bag(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    """The sparse gradient of `torch.nn.EmbeddingBag`: ops on its indices and values."""
    grad, indices, offsets, bags, *rest = args
    if len(bags) < len(indices):  # the forward need not have kept the bag of each index
        bags = offsets.new_zeros(len(indices) + 1).index_add_(0, offsets, torch.ones_like(offsets))
        bags = bags.cumsum(0)[:-1] - 1
    rest = [*rest[:1], *rest[2:5], *rest[6:]]  # without maximum_indices and sparse
    return aten._embedding_bag_sparse_backward.default(grad, indices, offsets, bags, *rest)


def _to_jagged(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    """The rows of a padded tensor that are no padding: the last offset is their number."""
    dense, offsets, *_ = args
    return op(dense, offsets, int(_host(offsets[0][-1], "number of jagged rows")))


HANDLERS: dict[str, Handler] = {
    "aten.nonzero.default": _nonzero,
    "aten.masked_select.default": _masked_select,
    "aten.repeat_interleave.Tensor": _repeat_interleave,
    "aten._unique.default": _on_host,
    "aten._unique2.default": _on_host,
    "aten.unique_dim.default": _on_host,
    "aten.unique_consecutive.default": _on_host,
    "aten.unique_dim_consecutive.default": _on_host,
    "aten.bincount.default": _on_host,
    "aten.kaiser_window.default": _on_host,
    "aten.kaiser_window.periodic": _on_host,
    "aten.kaiser_window.beta": _on_host,
}
_MASKED = {
    "aten.index.Tensor": _index,
    "aten.index_put_.default": _index_put,
    "aten.index_put.default": _index_put,
    "aten._index_put_impl_.default": _index_put,
}


def handler_of(op: torch._ops.OpOverload) -> Handler | None:
    """The handler of an overload that is always data dependent."""
    return HANDLERS.get(overload_name(op))


def needs_python(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Handler | None:
    """The handler of a call that is data dependent because of its arguments' types."""
    name = overload_name(op)
    if name == "aten._embedding_bag_backward.default" and args[_SPARSE]:
        return _sparse_bag
    if name == "aten._padded_dense_to_jagged_forward.default" and args[2:] in ((), (None,)):
        return _to_jagged
    handler = _MASKED.get(name)
    if handler is None:
        return None
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    if handler is _index_put and args[2].numel() == 1:
        return None  # one value for every true element: a select, with no shape to find out
    return handler

"""Ops of sparse tensors that have no kernel on the device: the CPU's, with copies."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tpu_core import _C
from tpu_core.config import config
from tpu_core.errors import FallbackError, UnsupportedOpError
from tpu_core.recorder import fallback
from tpu_core.recorder.error_parity import lacks_kernel, of_device
from tpu_core.recorder.functional_variants import overload_name, written_arguments


def run(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    requires_grad: bool = False,
) -> Any:
    """Run ``op`` on the CPU with copies of its arguments; copy results and mutations back.

    Args:
        op: The overload.
        args: Its positional arguments.
        kwargs: Its others.
        requires_grad: Whether the copies require gradients, which some kernels ask for.

    Raises:
        FallbackError: ``TPU_FALLBACK=error``.
        UnsupportedOpError: The CPU does not have the op for such a layout either.
    """
    name, line = overload_name(op), _C.user_line() or None
    if config().fallback == "error":
        raise FallbackError(
            f"{name} of sparse tensors has no kernel and TPU_FALLBACK=error.", line=line
        )
    device = next(
        (x.device for x in tree_leaves((args, kwargs)) if _ours(x)),
        torch.device("tpu", _C.current_device()),
    )
    started = time.perf_counter()
    copies: dict[int, torch.Tensor] = {}

    def to_host(x: Any) -> Any:
        if _ours(x):
            copy = copies.setdefault(id(x), x.cpu())
            return copy.requires_grad_() if requires_grad else copy
        return torch.device("cpu") if isinstance(x, torch.device) else x

    try:
        result = op(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    except NotImplementedError as error:
        if not lacks_kernel(error):
            raise of_device(error) from None
        raise UnsupportedOpError(
            f"{name} has no kernel for sparse tensors on device 'tpu' or the CPU.",
            line=line,
            remedy="Call it on x.to_dense(), or on the CPU's tensors of another layout.",
        ) from error
    originals = _write_back(op, args, kwargs, copies)

    def to_device(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return originals[id(x)] if id(x) in originals else x.to(device)
        return x

    back = tree_map(to_device, result)
    fallback.count(name, "of sparse tensors", line, time.perf_counter() - started)
    return back


def _write_back(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copies: dict[int, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Copy what the CPU wrote into the arguments; the arguments by the id of their copies."""
    originals: dict[int, torch.Tensor] = {}
    written = set(written_arguments(op))
    values = dict(zip((a.name for a in op._schema.arguments), args)) | kwargs
    for name in written:
        x = values.get(name)
        if x is None or not _ours(x):
            continue
        copy = copies[id(x)]
        if x.layout == torch.sparse_coo:
            x.sparse_resize_and_clear_(copy.shape, copy.sparse_dim(), copy.dense_dim())
        elif x.shape != copy.shape:
            x.resize_(copy.shape)
        x.copy_(copy)
        originals[id(copy)] = x
    return originals


def _ours(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "tpu"

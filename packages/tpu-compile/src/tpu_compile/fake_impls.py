"""Fake implementations for device ``tpu``, for ops whose meta function in PyTorch is another
device's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


def know_geometry(module: ModuleType) -> None:
    """Have ``torch._subclasses.fake_impls`` ask us about results of these ops on the device."""
    module.register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)
    for op in _FAKE_QUANTIZES:
        module.register_op_impl(op)(_fake_quantize)
    known = module.op_implementations_dict
    for op in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
        known[op] = _laid_out(known[op])


# PyTorch has kernels of them alone, which know no symbolic sizes.
_FAKE_QUANTIZES = (
    torch.ops.aten.fake_quantize_per_tensor_affine_cachemask.default,
    torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    torch.ops.aten.fake_quantize_per_channel_affine_cachemask.default,
)


def _fake_quantize(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if args else kwargs["self"]
    if x.device.type != "tpu":
        return NotImplemented
    with mode:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _grouped_mm(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from tpu_core.extend import meta_function

    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if any(x.device.type != "tpu" for x in tensors):
        return NotImplemented
    with mode:
        return meta_function("aten._grouped_mm.default")(*args, **kwargs)


def _laid_out(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's implementation for a convolution, with the strides that the device gives."""

    def convolution(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        found = implementation(mode, op, *args, **kwargs)
        given = dict(zip([a.name for a in op._schema.arguments], args)) | kwargs
        x, weight = given["input"], given["weight"]
        if x.device.type != "tpu" or (x.is_contiguous() and weight.is_contiguous()):
            return found
        dims = _dims_in_memory(op, given)
        if dims is None:
            return found
        with mode:
            laid_out = [
                t
                if t is None
                else torch.empty_permuted(t.size(), order, dtype=t.dtype, device=t.device)
                for t, order in zip(_listed(found), dims)
            ]
        return tuple(laid_out) if isinstance(found, (list, tuple)) else laid_out[0]

    return convolution


def _dims_in_memory(op: Any, given: dict[str, Any]) -> list[list[int]] | None:
    """Dims of the results from the outermost in memory, at the sizes that a trace is made with;
    None without such sizes.
    """
    # Both at the first call: this module is part of `import torch`.
    from tpu_compile.sizes import hint
    from tpu_core.extend import meta_function

    def replica(t: torch.Tensor) -> torch.Tensor:
        numbers = [[hint(n) for n in group] for group in (t.size(), t.stride())]
        return torch.empty_strided(*numbers, dtype=t.dtype, device="meta")

    try:
        replicas = tree_map_only(torch.Tensor, replica, given)
        replicas = tree_map_only(torch.SymInt, hint, replicas)
    except ValueError:
        return None
    found = _listed(meta_function(str(op))(*replicas.values()))
    return [[] if t is None else [*t.dim_order()] for t in found]


def _listed(results: Any) -> list[Any]:
    return [*results] if isinstance(results, (list, tuple)) else [results]

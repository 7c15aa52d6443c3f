"""Memory formats of results that PyTorch's meta functions give other strides than its CPU kernels.

A program has the strides that the CPU's kernels give: ``view`` raises for some and not for others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._meta_registrations as meta_functions
from torch._prims_common import suggest_memory_format

from tpu_core.recorder.functional_variants import overload_name

# Ops whose first result has the format that the argument at this position suggests: channels last
# where that lies so, else contiguous.
_SUGGESTED = {
    **{
        f"aten.{name}.default": 0
        for name in (
            "_batch_norm_with_update channel_shuffle max_unpool2d native_channel_shuffle "
            "native_group_norm pixel_shuffle pixel_unshuffle reflection_pad2d reflection_pad3d "
            "replication_pad2d replication_pad3d roll"
        ).split()
    },
    **{
        f"aten.{name}_backward.default": 1
        for name in (
            "batch_norm native_batch_norm native_group_norm reflection_pad2d reflection_pad3d "
            "replication_pad2d replication_pad3d"
        ).split()
    },
}

# Ops whose results are contiguous.
_CONTIGUOUS = frozenset(
    f"aten.{name}"
    for name in (
        "_ctc_loss_backward.default fractional_max_pool3d_backward.default glu_backward.default "
        "huber_loss_backward.default mse_loss_backward.default multi_margin_loss_backward.default "
        "multilabel_margin_loss_backward.default normal.Tensor_Tensor rrelu_with_noise.default "
        "smooth_l1_loss_backward.default"
    ).split()
)

# Ops of two operands whose result lies as theirs do, as that of a product.
_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in "floor_divide.default floor_divide.Scalar native_dropout_backward.default".split()
)


def as_on_cpu(op: torch._ops.OpOverload, args: Sequence[Any], result: Any) -> Any:
    """The results of a meta function with the strides of the CPU's kernel.

    Args:
        op: The overload.
        args: Its arguments, tensors on device ``meta``.
        result: Of the meta function; nothing reads its memory.
    """
    name = overload_name(op)
    if name in _PRODUCTS:
        product = torch.mul(args[0], args[1])
        return torch.empty_strided(
            result.size(), product.stride(), dtype=result.dtype, device=result.device
        )
    if name == "aten.roll.default" and not args[2]:  # of the elements, whatever their dims
        return empty(result, torch.contiguous_format)
    if (place := _SUGGESTED.get(name)) is not None:
        layout = suggest_memory_format(args[place])
    elif name in _CONTIGUOUS:
        layout = torch.contiguous_format
    else:
        return result
    if isinstance(result, torch.Tensor):
        return empty(result, layout)
    first, *others = result
    return (first if first is None else empty(first, layout), *others)


def empty(x: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """A tensor like ``x``, contiguous or with channels last, whatever the number of its dims."""
    dims = [*range(x.dim())]
    if layout != torch.contiguous_format:
        dims.append(dims.pop(1))
    return torch.empty_permuted(x.size(), dims, dtype=x.dtype, device=x.device)


def suggested(x: torch.Tensor) -> torch.Tensor:
    """A tensor like ``x`` in the format that it suggests."""
    return empty(x, suggest_memory_format(x))


def of_convolution(x: torch.Tensor, weight: torch.Tensor, *parameters: Any) -> torch.memory_format:
    """The format of the results of a convolution and of its backward.

    Args:
        x, weight: Input and weights.
        parameters: Stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    if x.is_contiguous() and weight.is_contiguous():
        return torch.contiguous_format
    # Memory is not touched, so that it costs nothing.
    x, weight = (
        torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu") for t in (x, weight)
    )
    backend = torch._C._select_conv_backend(x, weight, None, *parameters, None)
    if x.dim() == 3:  # PyTorch computes it as an image of one row
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    return torch._C._conv_determine_backend_memory_format(x, weight, backend)


class _MetaOfCpu(threading.local):
    """Device for which tensors on ``meta`` stand in this thread: the CPU, or what PyTorch takes."""

    is_meant = False


_meta_of_cpu = _MetaOfCpu()


@contextmanager
def meta_of_cpu() -> Iterator[None]:
    """Have PyTorch's meta functions give the strides of CPU kernels, where they give a GPU's else.

    The functions ask for the device that a tensor stands for, and take a GPU for the device of one
    that says nothing.
    """
    before, _meta_of_cpu.is_meant = _meta_of_cpu.is_meant, True
    try:
        yield
    finally:
        _meta_of_cpu.is_meant = before


def name_device_of_meta() -> None:
    """Make `meta_of_cpu` known to PyTorch; fake tensors of the device stand for the CPU's."""
    asked = meta_functions.device_hint

    def device_hint(tensor: torch.Tensor) -> str:
        hint = asked(tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return hint  # more ops have integers on a GPU, as `histc`
        is_of_cpu = _meta_of_cpu.is_meant and tensor.device.type == "meta"
        return "cpu" if is_of_cpu or hint == "tpu" else hint

    meta_functions.device_hint = device_hint

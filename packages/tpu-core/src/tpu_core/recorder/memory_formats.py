"""Memory formats of results that PyTorch's meta functions give other strides than its CPU kernels.

A program has the strides that the CPU's kernels give: ``view`` raises for some and not for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from tpu_core import torch_compat
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
    """A tensor like ``x`` in a format; one of three dims lies as an image of one row does."""
    if x.dim() == 3 and layout == torch.channels_last:
        return empty(x.unsqueeze(2), layout).squeeze(2)
    return torch.empty(x.size(), dtype=x.dtype, device=x.device, memory_format=layout)


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
    return torch_compat.convolution_format(x, weight, *parameters)

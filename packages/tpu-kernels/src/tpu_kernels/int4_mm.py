"""Products with weights of 4 bits, in the layout that a TPU reads."""

from __future__ import annotations

import torch

from tpu_core.array_types import Float, Int32, UInt8
from tpu_kernels.decorator import jax_op
from tpu_kernels.ops.int4_mm import layout
from tpu_kernels.ops.int4_mm.reference import int4_mm as plain

_pack = jax_op("tpu_kernels::int4_pack", layout.pack, differentiable=False)
_repack = jax_op("tpu_kernels::int4_repack", layout.repack, differentiable=False)
_mm = jax_op("tpu_kernels::int4_mm", plain)


def int4_pack(
    weight: UInt8[torch.Tensor, "rows pairs"],
) -> Int32[torch.Tensor, "pairs//4 rows"]:
    """Pack a weight for `int4_mm`.

    Args:
        weight: ``uint8[rows, columns / 2]``, on device ``tpu``: an even column in the high bits of
            a byte, the next in the low, as ``torch._convert_weight_to_int4pack`` takes it. 128
            divides the columns.

    Returns:
        ``int32[columns / 8, rows]``.

    Raises:
        ValueError: The weight is of another shape or dtype.

    Example:
        >>> packed = tpu_kernels.int4_pack(numbers[:, ::2] << 4 | numbers[:, 1::2])
    """
    if weight.dim() != 2 or weight.dtype != torch.uint8 or weight.size(1) % (layout.CHUNK // 2):
        raise ValueError(
            "int4_pack takes a weight uint8[rows, columns / 2] with a multiple of 128 columns, not "
            f"{weight.dtype}{list(weight.shape)}."
        )
    packed: torch.Tensor = _pack(weight)
    return packed


def int4_repack(
    packed: Int32[torch.Tensor, "tiles chunks 32 4"],
) -> Int32[torch.Tensor, "16*chunks 8*tiles"]:
    """Pack a weight for `int4_mm` that is packed for CUDA, such as one of a checkpoint.

    Args:
        packed: ``int32[rows / 8, columns / 128, 32, 4]`` on device ``tpu``, of
            ``torch._convert_weight_to_int4pack`` with 8 inner tiles of columns.

    Returns:
        ``int32[columns / 8, rows]``.

    Raises:
        ValueError: The weight is of another shape or dtype.

    Example:
        >>> packed = tpu_kernels.int4_repack(checkpoint["weight"].to("tpu"))
    """
    if packed.dim() != 4 or packed.shape[2:] != (32, 4) or packed.dtype != torch.int32:
        raise ValueError(
            "int4_repack takes what torch._convert_weight_to_int4pack makes for 8 inner tiles, "
            f"int32[rows / 8, columns / 128, 32, 4], not {packed.dtype}{list(packed.shape)}."
        )
    turned: torch.Tensor = _repack(packed)
    return turned


def int4_mm(
    x: Float[torch.Tensor, "*batch columns"],
    packed: Int32[torch.Tensor, "columns//8 rows"],
    group: int,
    scales_and_zeros: Float[torch.Tensor, "columns//{group} rows 2"],
) -> Float[torch.Tensor, "*batch rows"]:
    """The product of rows with the transpose of a weight of 4 bits.

    A number of the weight, 0 to 15, stands for ``(number - 8) * scale + zero``. For bfloat16 a TPU
    reads the weight at 4 bits; see the page *Kernels* of the reference. There is a gradient of
    ``x`` and of ``scales_and_zeros``, which builds the weight.

    Args:
        x: ``(..., columns)``, floating point, on device ``tpu``.
        packed: Of `int4_pack` or `int4_repack`.
        group: Columns that share a scale and a zero.
        scales_and_zeros: ``(columns / group, rows, 2)``, as ``torch._weight_int4pack_mm`` takes
            them; of the dtype of ``x``.

    Returns:
        ``(..., rows)`` of the dtype of ``x``.

    Raises:
        ValueError: The arguments do not fit each other.

    Example:
        >>> y = tpu_kernels.int4_mm(x, packed, 128, scales_and_zeros)
    """
    if packed.dim() != 2 or packed.dtype != torch.int32 or not x.dtype.is_floating_point:
        raise ValueError(
            "int4_mm takes floating-point rows and a weight int32[columns / 8, rows] of int4_pack, "
            f"not {x.dtype}{list(x.shape)} and {packed.dtype}{list(packed.shape)}."
        )
    columns, rows = 8 * packed.size(0), packed.size(1)
    if not x.dim() or x.size(-1) != columns:
        raise ValueError(f"int4_mm: rows of {list(x.shape)} meet a weight of {columns} columns.")
    if group <= 0 or columns % group or scales_and_zeros.shape != (columns // group, rows, 2):
        raise ValueError(
            f"int4_mm: for {columns} columns in groups of {group} scales and zeros are (columns / "
            f"group, {rows}, 2), not {tuple(scales_and_zeros.shape)}."
        )
    out: torch.Tensor = _mm(x.reshape(-1, columns), packed, group, scales_and_zeros)
    return out.view(*x.shape[:-1], rows)

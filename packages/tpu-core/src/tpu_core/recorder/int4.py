"""Geometry of products with weights of 4 bits.

PyTorch's meta functions check less than its kernels do, ask the operands for what only fake tensors
have, and lead to no kernel of the CPU that could word a mistake.
"""

from __future__ import annotations

import torch

from tpu_core.lowering.int4_layout import K_TILE, LANES, TILE

_INNER_TILES = (2, 4, 8)


def convert_weight(weight: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """Meta function of ``aten::_convert_weight_to_int4pack``.

    Raises:
        RuntimeError: The weight is not two numbers a byte, or is not made of whole tiles.
    """
    torch._check(
        weight.dim() == 2 and weight.dtype == torch.uint8,
        lambda: (
            f"_convert_weight_to_int4pack: expected a 2-D weight of dtype uint8, two columns a "
            f"byte; got {weight.dtype}{list(weight.shape)}."
        ),
    )
    torch._check(
        inner_k_tiles in _INNER_TILES,
        lambda: f"_convert_weight_to_int4pack: innerKTiles is 2, 4 or 8, not {inner_k_tiles}.",
    )
    rows, columns = weight.size(0), 2 * weight.size(1)
    torch._check(
        rows % TILE == 0 and columns % (inner_k_tiles * K_TILE) == 0,
        lambda: (
            f"_convert_weight_to_int4pack: {TILE} divides the rows and {inner_k_tiles * K_TILE} "
            f"the columns of a weight; got {rows} and {columns}."
        ),
    )
    shape = (rows // TILE, columns // (inner_k_tiles * K_TILE), LANES, inner_k_tiles // 2)
    return weight.new_empty(shape, dtype=torch.int32)


def weight_mm(
    x: torch.Tensor, weight: torch.Tensor, group: int, scales_and_zeros: torch.Tensor
) -> torch.Tensor:
    """Meta function of ``aten::_weight_int4pack_mm``.

    Raises:
        RuntimeError: The operands do not fit together.
    """
    torch._check(
        x.dim() == 2 and x.dtype in (torch.float32, torch.bfloat16, torch.float16),
        lambda: (
            f"_weight_int4pack_mm: expected 2-D rows of a floating-point dtype; got "
            f"{x.dtype}{list(x.shape)}."
        ),
    )
    packed = weight.dim() == 4 and weight.size(2) == LANES and weight.size(3) in (1, 2, 4)
    torch._check(
        packed and weight.dtype == torch.int32,
        lambda: (
            f"_weight_int4pack_mm: expected a weight that _convert_weight_to_int4pack packed; "
            f"got {weight.dtype}{list(weight.shape)}."
        ),
    )
    rows = weight.size(0) * TILE
    columns = weight.size(1) * weight.size(3) * 2 * K_TILE
    torch._check(
        x.size(1) == columns,
        lambda: (
            f"_weight_int4pack_mm: the rows have {x.size(1)} columns, the weight has {columns}."
        ),
    )
    torch._check(
        group > 0 and columns % group == 0,
        lambda: f"_weight_int4pack_mm: groups of {group} do not divide {columns} columns.",
    )
    shape = (columns // group, rows, 2)
    torch._check(
        tuple(scales_and_zeros.shape) == shape,
        lambda: (
            f"_weight_int4pack_mm: scales and zeros are {list(shape)} for groups of {group}; "
            f"got {list(scales_and_zeros.shape)}."
        ),
    )
    return x.new_empty(x.size(0), rows)

"""Geometry of products of 8-bit floats with scales.

PyTorch's meta functions are CUDA's: they ask for a layout and for sizes that 16 divides, and know
scales that its CPU does not. Whatever the CPU refuses is an error here, which it is asked to word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BIASES = (torch.float32, torch.bfloat16, torch.float16)
_TENSOR_WISE, _ROW_WISE = 0, 1  # at::blas::ScalingType
_NO_SWIZZLE = 0  # at::blas::SwizzleType


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | int | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Meta function of ``aten::_scaled_mm``.

    Raises:
        RuntimeError: The CPU has no such product.
    """
    _check(_are_matrices(a, b), "operands", a, b)
    whole = _is_one(scale_a) and _is_one(scale_b)
    _check(whole or _are_of_rows(a, b, scale_a, scale_b), "scales", scale_a, scale_b)
    _check(scale_result is None or _is_one(scale_result), "scale_result", scale_result)
    _check(bias is None or bias.numel() == b.size(1), "bias", bias)
    return _result(a, b, out_dtype)


def scaled_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | int | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """As `scaled_mm` for ``aten::_scaled_mm_v2``."""
    _check(_are_matrices(a, b), "operands", a, b)
    recipes = [*recipe_a], [*recipe_b]
    whole = recipes == ([_TENSOR_WISE], [_TENSOR_WISE]) and all(map(_is_one, (*scale_a, *scale_b)))
    of_rows = recipes == ([_ROW_WISE], [_ROW_WISE]) and _are_of_rows(a, b, *scale_a, *scale_b)
    _check(whole or of_rows, "scales", *scale_a, *scale_b)
    plain = all(s == _NO_SWIZZLE for s in (*swizzle_a, *swizzle_b))
    _check(plain, "swizzles", swizzle_a, swizzle_b)
    is_bias = bias is None or (bias.numel() == b.size(1) and bias.dtype in _BIASES)
    _check(is_bias, "bias", bias)
    return _result(a, b, out_dtype)


def _result(a: torch.Tensor, b: torch.Tensor, dtype: Any) -> torch.Tensor:
    # The recorder has a dtype as its number, which the op takes as well.
    result: torch.Tensor = torch.ops.aten.new_empty.default(a, [a.size(0), b.size(1)], dtype=dtype)
    return result


def _check(holds: bool, what: str, *given: Any) -> None:
    torch._check(holds, lambda: f"Invalid {what} of a scaled product: {given}")


def _are_matrices(a: torch.Tensor, b: torch.Tensor) -> bool:
    is_float8 = a.dtype in _FLOAT8 and b.dtype in _FLOAT8
    return is_float8 and a.dim() == b.dim() == 2 and a.size(1) == b.size(0)


def _is_one(scale: torch.Tensor) -> bool:
    return scale.numel() == 1 and scale.dtype == torch.float32


def _are_of_rows(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> bool:
    """Return whether there is one a row of ``a`` and one a column of ``b``."""
    shapes = [(a.size(0), 1), (1, b.size(1))]
    return all(
        x.dtype == torch.float32 and x.shape == shape and x.is_contiguous()
        for x, shape in zip((scale_a, scale_b), shapes)
    )

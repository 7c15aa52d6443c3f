"""Statistics of CPU tensors, as errors show them."""

from __future__ import annotations

import torch


def non_finite(t: torch.Tensor) -> tuple[int, int]:
    """Number of NaNs and of infinities; zeros for dtypes that have neither."""
    if not (t.is_floating_point() or t.is_complex()):
        return 0, 0
    if t.dtype.itemsize == 1:  # 8-bit floats have no isnan of their own
        t = t.float()
    return int(torch.isnan(t).sum()), int(torch.isinf(t).sum())


def kind(t: torch.Tensor) -> str:
    """Dtype and shape, such as ``float32[8, 128]``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def statistics(t: torch.Tensor) -> str:
    """Dtype, shape and range of a CPU tensor, and whether all of it is finite.

    Example:
        >>> statistics(torch.tensor([-0.2, 4.1]))
        'float32[2] min -0.2 max 4.1 finite'
    """
    if t.numel() == 0 or t.is_complex() or t.dtype is torch.bool:
        return kind(t)
    nans, infinities = non_finite(t)
    finite = t[torch.isfinite(t)] if nans or infinities else t
    parts = [kind(t)]
    if finite.numel():
        low, high = finite.min().item(), finite.max().item()
        parts.append(f"min {low:.6g} max {high:.6g}")
    if nans or infinities:
        parts.append(f"not finite before this op ({nans} NaN, {infinities} infinite)")
    else:
        parts.append("finite")
    return " ".join(parts)

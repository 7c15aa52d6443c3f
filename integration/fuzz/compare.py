"""Differences of results: structure, dtype, shape, strides, values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

# Relative to the larger of an element and the largest finite element: XLA sums and rounds in
# another order, and its exp, log, tanh, ... differ from the CPU's by some units in the last place.
# Operands are of the order of one, so that what cancels is right to a tenth of that. A wrong dim,
# mask or element is wrong by far more.
TOLERANCES = {
    torch.float64: 1e-7,  # of special functions; sums are right to 1e-13
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 4e-3,  # 4 units in the last place: a fused program rounds once
    torch.bfloat16: 3.2e-2,
}

Difference = tuple[str, str]


def tolerance(*dtypes: torch.dtype) -> float:
    """Of a result of operands of these dtypes: that of the coarsest."""
    return max((TOLERANCES.get(d, 0.0) for d in dtypes), default=0.0)


def difference(
    want: Any, got: Any, *, least: float = 0.0, strides: bool = False, path: str = ""
) -> Difference | None:
    """The first difference of a result from the CPU's: its kind and a text.

    Args:
        want: From the CPU.
        got: From the device; tensors are read.
        least: Tolerance, where that of the dtype is smaller.
        strides: Whether strides are compared.
        path: Of the results in their structure, for the text.
    """
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        return _of_tensors(want, got, least, strides, path)
    if isinstance(want, dict) and isinstance(got, dict):
        want, got = [*want.items()], [*got.items()]
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(want) != len(got):
            return "shape", f"{path} {len(want)} results on the CPU, {len(got)} on the device"
        return _of_lists(want, got, least, strides, path)
    if isinstance(want, float) and isinstance(got, float):
        if math.isclose(want, got, rel_tol=max(1e-4, least), abs_tol=1e-6):
            return None
        if math.isnan(want) and math.isnan(got):
            return None
    if type(want) is not type(got) or want != got:
        if isinstance(want, torch.device) and isinstance(got, torch.device):
            return None
        return "value", f"{path} cpu {want!r}, device {got!r}"
    return None


def _of_lists(
    want: Sequence[Any], got: Sequence[Any], least: float, strides: bool, path: str
) -> Difference | None:
    for i, (w, g) in enumerate(zip(want, got)):
        found = difference(w, g, least=least, strides=strides, path=f"{path}[{i}]")
        if found:
            return found
    return None


def _of_tensors(
    want: torch.Tensor, got: torch.Tensor, least: float, strides: bool, path: str
) -> Difference | None:
    if want.dtype != got.dtype:
        return "dtype", f"{path} cpu {want.dtype}, device {got.dtype}"
    if want.shape != got.shape:
        return "shape", f"{path} cpu {list(want.shape)}, device {list(got.shape)}"
    if strides and want.numel() and _steps(want) != _steps(got):
        text = f"{path} {list(want.shape)}: cpu {want.stride()}, device {got.stride()}"
        return "strides", text
    if want.layout != torch.strided:
        return None
    host = got.detach().cpu()
    if host.shape != want.shape or host.dtype != want.dtype:
        return "shape", f"{path} read as {host.dtype}{list(host.shape)}"
    return values_differ(want.detach(), host, least, path)


def _steps(t: torch.Tensor) -> list[int]:
    return [s for n, s in zip(t.shape, t.stride()) if n > 1]


def values_differ(
    want: torch.Tensor, got: torch.Tensor, least: float = 0.0, path: str = ""
) -> Difference | None:
    """Whether two tensors of the CPU differ beyond their dtype's tolerance."""
    w, g = want.resolve_conj().resolve_neg(), got.resolve_conj().resolve_neg()
    if not w.numel():
        return None
    limit = max(TOLERANCES.get(w.dtype, 0.0), least)
    if not (w.dtype.is_floating_point or w.dtype.is_complex):
        bad = w != g
    else:
        wide = torch.complex128 if w.dtype.is_complex else torch.float64
        a, b = w.to(wide), g.to(wide)
        if wide is torch.complex128:
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        size = a.abs()
        largest = size[size.isfinite()].max().item() if size.isfinite().any() else 0.0
        near = (a - b).abs() <= limit * max(largest, 0.1)
        bad = ~(near | (a == b) | (a.isnan() & b.isnan()))
    if not bad.any():
        return None
    n, at = int(bad.sum()), bad.nonzero()[0].tolist()
    where = tuple(at[: w.dim()])
    text = (
        f"{path} {w.dtype}{list(w.shape)}: {n} of {bad.numel()} differ, the first at {list(at)}: "
        f"cpu {w[where].tolist()!r}, device {g[where].tolist()!r}"
        f"; cpu {w.flatten()[:6].tolist()}, device {g.flatten()[:6].tolist()}"
    )
    return "value", text

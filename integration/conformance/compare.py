"""Copies of arguments on the device, and comparisons of what comes back with the CPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

DEVICE = "tpu"
# Two libraries round in different orders: some hundred units in the last place over a whole op.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Different(AssertionError):
    """A result of the device is not the CPU's."""


class ToDevice:
    """Tensors of the device in place of the CPU's; those that share a storage still do."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, tuple[Any, torch.Tensor]] = {}

    def __call__(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in self._tensors:
                # The original is kept, so that no other tensor gets its id.
                self._tensors[id(x)] = (x, self._tensor(x))
            return self._tensors[id(x)][1]
        if isinstance(x, str):
            return DEVICE if x == "cpu" else x
        return torch.device(DEVICE) if x == torch.device("cpu") else x

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        y = self._values(x.detach())
        if isinstance(x, torch.nn.Parameter):
            return torch.nn.Parameter(y, x.requires_grad)
        return y.requires_grad_(x.requires_grad)

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        if x.layout is not torch.strided:
            return x.to(DEVICE)
        if x.is_conj():
            return self._values(x.conj()).conj()
        if x.is_neg():
            return torch._neg_view(self._values(torch._neg_view(x)))
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            if x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size():
                y = x.to(DEVICE)
                self._storages[key] = y.view(-1)
                return y
            size = storage.nbytes() // x.element_size()
            self._storages[key] = x.as_strided((size,), (1,), 0).to(DEVICE)
        base = self._storages[key].view(x.dtype)
        return base.as_strided(x.shape, x.stride(), x.storage_offset())


def to_host(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    return (x.to_dense() if x.layout is not torch.strided else x).cpu().resolve_conj().resolve_neg()


def widened(x: Any) -> Any:
    """The same values with more digits, for a reference that neither side computed."""
    if isinstance(x, torch.Tensor) and x.dtype in WIDER:
        return x.detach().to(WIDER[x.dtype]).requires_grad_(x.requires_grad)
    return WIDER.get(x, x) if isinstance(x, torch.dtype) else x


def shapes(got: Any, want: Any) -> None:
    """Compare structure, shapes and dtypes.

    Raises:
        Different: They are not the CPU's.
    """
    got_leaves, got_tree = tree_flatten(got)
    want_leaves, want_tree = tree_flatten(want)
    if got_tree != want_tree:
        raise Different(f"structure {got_tree}, not {want_tree}")
    for g, w in zip(got_leaves, want_leaves, strict=True):
        if isinstance(w, torch.Tensor):
            if not isinstance(g, torch.Tensor):
                raise Different(f"{type(g).__name__}, not a tensor")
            if (g.shape, g.dtype) != (w.shape, w.dtype):
                raise Different(
                    f"{g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}".replace("torch.", "")
                )


def places(got: Any) -> None:
    """Check that every tensor is on the device.

    Raises:
        Different: One is not.
    """
    for g in tree_flatten(got)[0]:
        if isinstance(g, torch.Tensor) and g.device.type != DEVICE:
            raise Different(f"a result on {g.device}")


def values(got: Any, want: Any, reference: Any = None) -> None:
    """Compare results of the device with the CPU's.

    Args:
        got: The device's.
        want: The CPU's.
        reference: Computes them with more digits; the device may be as far from it as the CPU.

    Raises:
        Different: They are not the CPU's, and farther from the reference.
    """
    got_leaves, want_leaves = tree_flatten(got)[0], tree_flatten(want)[0]
    exact: list[Any] | None = None
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        if not isinstance(w, torch.Tensor):
            if not isinstance(w, (int, float, complex, bool, str, torch.dtype)) or g == w:
                continue
            if g != g and w != w:
                continue
            tolerance = 1e-6 if isinstance(w, (float, complex)) else 0
            if isinstance(w, str) or abs(g - w) > tolerance * (1 + abs(w)):
                raise Different(f"{g!r}, not {w!r}")
            continue
        g, w = to_host(g), to_host(w)
        tolerance = TOLERANCES.get(w.dtype, 0.0)
        if w.dtype.itemsize == 1 and w.is_floating_point():
            g, w = g.float(), w.float()
        try:
            torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            if exact is None and reference is not None and w.dtype in WIDER:
                exact = _try(reference)
            if exact is None or not _as_near(g, w, exact[i]):
                raise Different(_short(str(error), g, w)) from None


def _try(reference: Any) -> list[Any] | None:
    try:
        return tree_flatten(reference())[0]
    except Exception:  # the CPU need not have the op with more digits
        return None


def _as_near(g: torch.Tensor, w: torch.Tensor, exact: Any) -> bool:
    """Whether the largest error is no more than four times the CPU's own."""
    if not isinstance(exact, torch.Tensor) or exact.shape != w.shape:
        return False
    exact = to_host(exact)
    finite = exact.isfinite()
    narrow = exact.to(w.dtype)
    if not torch.equal(g[~finite].isnan(), w[~finite].isnan()):
        return False
    # What overflows in the narrow dtype overflows in both, at its edge in one of them.
    finite &= narrow.isfinite() & w.isfinite()
    if not g[finite].isfinite().all():
        return False

    def error(x: torch.Tensor) -> float:
        e = (x.to(exact.dtype) - exact).abs()[finite]
        return float((e / (exact.abs()[finite] + 1e-3)).max()) if e.numel() else 0.0

    tiny = torch.finfo(w.dtype).eps
    return error(g) <= 4 * error(w) + 8 * tiny


def _short(text: str, g: torch.Tensor, w: torch.Tensor) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith("The failure")]
    if w.numel() <= 4:
        lines.append(f"{g.tolist()}, not {w.tolist()}")
    return "; ".join(lines)[:400]

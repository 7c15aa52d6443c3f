"""What PyTorch's CPU says of a program of the fuzzer ``xla``, and how near a result must be.

A value whose bits follow from the program (integers, moves, sums of integers that the type holds)
must be equal. Any other is computed in float64 as well, once as it is and some times with operands
and results changed by as much as the type's rounding: results must be as near to the first as these
are, times a factor. XLA may leave out roundings between the ops of a fusion, and sum in any order;
it may not do worse than rounding each op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .xla_ops import DTYPES, OPS, Tensor, run

NOISY = 3
# Of the largest change by noise: roundings of all elements may go in one direction, and the
# largest of a few random draws is not the largest there is.
FACTOR = 16.0
# Functions are computed with numbers of about 1 inside: lgamma(1) need not be 0.
FLOOR = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.complex128: 2.0**-52}
# Integers up to 2**n are exact.
DIGITS = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.complex64: 24,
    torch.float64: 53,
    torch.complex128: 53,
}


class Unknown(Exception):
    """No result is right or wrong: a step at a value that is not known to the last bit."""


@dataclass
class Value:
    """A value on the CPU.

    Attributes:
        v: In its own type.
        same: Whether a device must have the same bits.
        wide: In float64, first as it is, then noisy; empty where ``same``.
    """

    v: Tensor
    same: bool
    wide: list[Tensor] = field(default_factory=list)

    def widened(self, k: int) -> Tensor:
        return self.wide[k] if self.wide else widen(self.v)

    def tolerance(self) -> float:
        """Largest absolute difference from ``wide[0]`` that rounding explains."""
        if not self.v.numel():
            return 0.0
        noisy, own = distance(self.wide[1:], self.wide[0]), distance([self.v], self.wide[0])
        return FACTOR * (noisy + floor_of(self.v.dtype)) + 4 * own


def floor_of(dtype: torch.dtype) -> float:
    return FLOOR.get(dtype, FLOOR[torch.float32])


def distance(values: list[Tensor], exact: Tensor) -> float:
    return max(float((widen(x) - exact).abs().max()) for x in values) if exact.numel() else 0.0


def widen(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.to(torch.float64) if x.is_floating_point() else x


def noise(x: Tensor, eps: float, together: float, g: torch.Generator) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return x
    u = torch.rand(x.shape, generator=g, dtype=torch.float64) * 2 - 1
    all_of_it = float(torch.rand((), generator=g)) * 2 - 1
    return x * (1 + eps * u + eps * together * all_of_it)


def is_whole(x: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()):
        return True
    parts = torch.view_as_real(x) if x.is_complex() else x
    return bool(torch.isfinite(parts).all() and (parts == parts.round()).all())


def magnitude(x: Tensor, raw: bool) -> Tensor:
    if raw or x.dtype == torch.bool:
        return x
    if x.is_complex():
        return (x.real.abs() + x.imag.abs()).double()
    return x.double().abs()


def same_sums(name: str, operands: list[Value], params: dict[str, Any], v: Tensor) -> bool:
    """Whether all partial results are integers that the type holds."""
    if v.dtype not in DIGITS:
        return True
    if not all(is_whole(x.v) for x in operands):
        return False
    raw = OPS[name].raw
    sizes = [magnitude(x.v, i in raw) for i, x in enumerate(operands)]
    bound = run(name, sizes, params, bound=True)
    return not bound.numel() or float(bound.max()) <= 2 ** DIGITS[v.dtype]


def fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a conversion has one answer."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not x.numel():
        return True
    if not (x.is_floating_point() or x.is_complex()):
        return True
    x = x.real if x.is_complex() else x
    info = torch.iinfo(dtype)
    inside = (x >= info.min) & (x.double() < float(info.max))
    return bool((inside & x.isfinite()).all())


def result(name: str, operands: list[Value], params: dict[str, Any], seed: int) -> Value:
    """A node's value.

    Raises:
        Unknown: It is not determined.
        Exception: PyTorch's, for what it refuses.
    """
    kind = OPS[name].kind
    with torch.no_grad():
        v = run(name, [x.v.detach() for x in operands], params)
    same = all(x.same for x in operands)
    if kind == "steps" and not same:
        raise Unknown
    if kind == "to":
        if not fits(operands[0].v, DTYPES[params["dtype"]]):
            raise Unknown
        if not same and not (v.is_floating_point() or v.is_complex()):
            raise Unknown
    elif kind == "sums":
        with torch.no_grad():
            same = same and same_sums(name, operands, params, v)
    elif kind == "smooth":
        same = False
    value = Value(run(name, [x.v for x in operands], params), same)
    if same:
        return value
    eps = max(torch.finfo(t.dtype).eps for t in (v, *(x.v for x in operands)) if t.dtype in DIGITS)
    together = max(max((x.v.numel() for x in operands), default=1) / max(v.numel(), 1), 1) ** 0.5
    params = (
        {**params, "dtype": "complex128" if v.is_complex() else "float64"}
        if kind == "to"
        else params
    )
    g = torch.Generator().manual_seed(seed)
    value.wide.append(run(name, [x.widened(0) for x in operands], params))
    for k in range(1, NOISY + 1):
        noisy = [noise(x.widened(k), eps, together, g) for x in operands]
        wide = noise(run(name, noisy, params), eps, 0.0, g)
        if kind == "smooth":  # all elements by the same, as of lgamma(1) in each
            wide = wide + floor_of(v.dtype) * (4 * float(torch.rand((), generator=g)) - 2)
        value.wide.append(wide)
    return value

"""Tolerance between a program's results and those of its ops one by one.

The ops run three times: as they are, and twice with their inputs and each of their results off by a
few units in the last place, as another order of sums or a fused multiply-add would leave them.
What these runs spread over is what rounding can do to this segment with these values; a program may
lie a multiple of it away. (Known as Monte Carlo arithmetic: D. S. Parker, *Monte Carlo Arithmetic*,
UCLA, 1997.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpu_core.compiler.replay import Again, replay
from tpu_core.compiler.segment import Segment

# Units in the last place that a result is off by, at most: as many as the rounding of a mean over
# thousands of elements, which is subtracted from all. Of 16-bit floats so many would leave nothing.
_OFF, _OFF_NARROW = 128, 8
_ALLOWED = 16  # times the spread,
# and its square where the spread is such a part of the largest element: what is zero but for
# rounding, as the gradient of a bias before a norm, and its square in an optimizer's second moment.
_NOISE = 1 / 16
_LEAST = 64  # units in the last place of a result's largest element, at least
_RUNS = 2

# What moves numbers does not round them; a 1 that is compared with must stay one.
_EXACT = frozenset(
    "abs amax amin argmax argmin arange cat clamp clone copy_ copy constant_pad_nd embedding eq "
    "eye fill fill_ flip full gather ge gt index index_put index_select isfinite isnan le lt max "
    "max_pool2d_with_indices maximum min minimum ne neg one_hot ones relu roll scatter sign "
    "slice_scatter sort stack threshold_backward topk tril triu where zero_ zeros _to_copy "
    "scalar_tensor select_scatter as_strided_scatter masked_fill masked_fill_ repeat "
    "_foreach_zero_ _foreach_neg zeros_like ones_like full_like".split()
)

# Gradients that are differences of larger terms, linear in their first operand: they are rounded as
# the terms are. Whatever comes in, the gradient before a norm adds up to zero but for this.
_DIFFERENCES = frozenset(
    "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward "
    "cudnn_batch_norm_backward _softmax_backward_data _log_softmax_backward_data".split()
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that rounding does not explain.

    Attributes:
        slot: Its slot in the segment.
        index: The element that is farthest off.
        expected, found: That element, op by op and of the program.
        off: Largest difference.
        allowed: Largest difference that is allowed.
        elements: Number of elements that are too far off.
    """

    slot: int
    index: tuple[int, ...]
    expected: float
    found: float
    off: float
    allowed: float
    elements: int


def difference(
    segment: Segment,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[float | int],
    results: Sequence[torch.Tensor],
) -> Difference | None:
    """The first result of a program that lies too far from that of its ops, or None.

    Args:
        segment: The segment that the program computes.
        inputs: Its inputs, on the CPU.
        numbers: Its numbers.
        results: Its results for the live slots.
    """
    expected = replay(segment, inputs, numbers)
    if all(torch.equal(e, r) for e, r in zip(expected, results, strict=True)):
        return None
    generator = torch.Generator().manual_seed(0)
    is_narrow = any(s.dtype.kind in "fcV" and s.dtype.itemsize < 4 for s in segment.slots)
    most = _OFF_NARROW if is_narrow else _OFF

    def between(x: torch.Tensor) -> torch.Tensor:
        """A number between -1 and 1 for each element."""
        return torch.rand(x.shape, generator=generator, device="cpu") * 2 - 1

    def off(op: str, value: torch.Tensor, again: Again | None = None) -> torch.Tensor:
        if _base(op) in _EXACT or not value.is_floating_point():
            return value
        terms = value.double()
        if again is not None and _base(op) in _DIFFERENCES and value.numel():
            # With a gradient that follows no pattern, the terms do not cancel.
            terms = again(lambda grad: (grad * between(grad)).to(grad.dtype)).double().abs().amax()
        unit = torch.finfo(value.dtype).eps
        return (value.double() + terms * most * unit * between(value)).to(value.dtype)

    # The inputs too: an op may take the difference of what it was given.
    others = [
        replay(segment, [off("input", x) for x in inputs], numbers, off) for _ in range(_RUNS)
    ]
    for slot, want, found, *near in zip(segment.live, expected, results, *others):
        if (found_off := _compare(slot, want, found, near)) is not None:
            return found_off
    return None


def _compare(
    slot: int, want: torch.Tensor, found: torch.Tensor, near: Sequence[torch.Tensor]
) -> Difference | None:
    exact = not (want.is_floating_point() or want.is_complex())
    unit = 0.0 if exact else torch.finfo(want.dtype).eps
    want, found, *near = (_wide(t) for t in (want, found, *near))
    if not want.numel():
        return None
    # An element that the runs do not agree on being finite may be either.
    finite = torch.isfinite(want)
    settled = torch.stack([torch.isfinite(t) == finite for t in near]).all(0)
    same = (want == found) | (want.isnan() & found.isnan())
    spread = torch.stack([(t - want).abs() for t in near]).amax(0)
    if exact:  # an integer or a bool: where the runs agree, there is one answer
        settled &= spread == 0
        allowed = torch.zeros((), device="cpu")
    else:
        largest = want.abs().where(finite, 0).amax()
        noise = spread.where(finite & settled, 0).amax()
        times = _ALLOWED if noise < _NOISE * largest else _ALLOWED**2
        allowed = times * noise + _LEAST * unit * largest
    off = (found - want).abs()
    wrong = settled & ~same & ~(off <= allowed)  # NaN is off
    if not wrong.any():
        return None
    farthest = int(off.nan_to_num(torch.inf).where(wrong, -1).flatten().argmax())
    index = tuple(
        int(i) for i in torch.unravel_index(torch.tensor(farthest, device="cpu"), want.shape)
    )
    return Difference(
        slot,
        index,
        float(want[index]),
        float(found[index]),
        float(off[index]),
        float(allowed),
        int(wrong.sum()),
    )


def _base(op: str) -> str:
    """``"add"`` of ``"aten.add.Tensor"``."""
    return op.split(".")[1] if "." in op else op


def _wide(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.double()

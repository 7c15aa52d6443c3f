"""Debug mode: each op runs and is waited for, so that an error is raised at its own line.

Indices out of range, which a program on the device cannot report, are found here. With
``TPU_DEBUG_NANS=1`` so are NaNs and infinities.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_core.config import config
from tpu_core.errors import NonFiniteError
from tpu_core.metrics import METRICS
from tpu_core.modes import Mode
from tpu_core.pjrt.client import fetch
from tpu_core.recorder.host_replay import call_of_last
from tpu_eager.indices import check_indices


def inspect(segment: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Check an op that ran.

    Args:
        segment: The segment of the one op.
        inputs: Arrays of its input slots.
        outputs: Arrays of its live slots.

    Raises:
        IndexError: An index is out of range.
        NonFiniteError: A result is not finite, and ``TPU_DEBUG_NANS`` asks for that.
    """
    check_indices(segment, inputs)
    if config().debug_nans:
        METRICS.debug_check()
        check_finite(segment, inputs, outputs)


def check_finite(segment: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Raise where an op's result holds a NaN, or an infinity that its arguments do not.

    Args:
        segment, inputs, outputs: As of `inspect`.

    Raises:
        NonFiniteError: Names the op, the kind of value, the range of each argument and the user's
            line.
    """
    for array in outputs:
        host = fetch(array)
        if not (host.is_floating_point() or host.is_complex()):
            continue
        nans, infinities = _count(host)
        if nans == infinities == 0:
            continue
        call = call_of_last(segment, inputs)
        arguments = dict(call.tensors()) if call else {}
        numbers = {
            name: value
            for name, value in (call.arguments.items() if call else ())
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        # A mask of -inf is meant to be one.
        given = [
            *arguments.values(),
            *(torch.tensor(float(n), device="cpu") for n in numbers.values()),
        ]
        if nans == 0 and any(_count(t)[1] for t in given):
            continue
        node = segment.nodes[-1]
        kinds = [f"{n} {k}" for n, k in ((nans, "NaN"), (infinities, "infinite")) if n]
        raise NonFiniteError(
            f"{node.name} produced {' and '.join(kinds)} of {host.numel()} values.",
            values={
                "result": _kind(host),
                **{f"input {name}": statistics(t) for name, t in arguments.items()},
                **{f"input {name}": value for name, value in numbers.items()},
            },
            line=node.line or None,
        )


def statistics(t: torch.Tensor) -> str:
    """Dtype, shape and range of a CPU tensor, and whether all of it is finite.

    Example:
        >>> statistics(torch.tensor([-0.2, 4.1]))
        'float32[2] min -0.2 max 4.1 finite'
    """
    if t.numel() == 0 or t.is_complex() or t.dtype is torch.bool:
        return _kind(t)
    nans, infinities = _count(t)
    finite = t[torch.isfinite(t)] if nans or infinities else t
    parts = [_kind(t)]
    if finite.numel():
        low, high = finite.min().item(), finite.max().item()
        parts.append(f"min {low:.6g} max {high:.6g}")
    if nans or infinities:
        parts.append(f"not finite before this op ({nans} NaN, {infinities} infinite)")
    else:
        parts.append("finite")
    return " ".join(parts)


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _count(t: torch.Tensor) -> tuple[int, int]:
    """Number of NaNs and of infinities."""
    if not (t.is_floating_point() or t.is_complex()):
        return 0, 0
    if t.dtype.itemsize == 1:  # 8-bit floats have no isnan of their own
        t = t.float()
    return int(torch.isnan(t).sum()), int(torch.isinf(t).sum())


DEBUG = Mode("debug", max_ops=1, wait=True, inspect=inspect)

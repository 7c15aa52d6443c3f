"""Reads of device values by the host."""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C
from tpu_core.config import config
from tpu_core.errors import map_xla_error
from tpu_core.host_syncs import AS_WRITTEN as _AS_WRITTEN
from tpu_core.host_syncs import SYNCS
from tpu_core.logs import warn_at
from tpu_core.metrics import METRICS
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import padded_array as arrays


def to_host(array: Any, reason: str) -> torch.Tensor:
    """A value's array as a CPU tensor; waits for it.

    Args:
        array: The array, a `jax.Array` or a `PaddedArray`.
        reason: The reading call, such as ``"item"``.
    """
    try:
        host = pjrt.fetch(arrays.on_host(array))
    except Exception as error:
        raise map_xla_error(error, stage="run") from error
    note_read(array, reason, host.nbytes)
    return host


# 0: reads are allowed; 1: each gives a warning; 2: each raises.
_debug_level = 0


def set_debug_level(level: int) -> None:
    """Have reads allowed (0), warned of (1) or refused (2), in the whole process."""
    global _debug_level
    _debug_level = level


def debug_level() -> int:
    """The level that `set_debug_level` has set."""
    return _debug_level


def note_read(array: Any, reason: str, nbytes: int) -> None:
    """Count a read of ``nbytes`` bytes, and warn where it is one of many.

    Raises:
        RuntimeError: Reads are refused.
    """
    line = _C.user_line() or None
    METRICS.host_sync(line, reason)
    METRICS.d2h(nbytes)
    if _debug_level:
        _report(line, reason)
        return
    if line is not None and config().performance_warnings:
        SYNCS.read(line, reason, array)


def _report(line: str | None, reason: str) -> None:
    what = _AS_WRITTEN.get(reason, reason)
    text = f"called a synchronizing TPU operation: {what}, at {line or 'an unknown line'}"
    if _debug_level > 1:
        raise RuntimeError(text)
    warn_at(line, UserWarning(text))

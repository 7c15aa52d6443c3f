"""Settings of `torch.tpu`: the eager mode, the precision of float32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpu_core.modes import Mode

# at::Float32MatmulPrecision, which is part of the signature of every product.
_CODES = {"highest": 0, "high": 1, "medium": 2}


def set_eager_mode(mode: str | Mode) -> AbstractContextManager[None]:
    """Context manager: run a block in mode ``"debug"``, ``"strict"`` or ``"fused"``, or in a
    `tpu_core.extend.Mode`.

    Assign ``torch.tpu.eager_mode = "strict"`` to change the whole process.
    """
    from tpu_core import modes

    return modes.using(mode)


_SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Find the lines that wait for the device, as `torch.cuda.set_sync_debug_mode` does.

    On the CPU platform ops run as programs from then on, as they would on a TPU: CPU kernels
    (``TPU_TIERS``) have nothing to wait for.

    Args:
        debug_mode: ``"default"`` or 0: reads of values by the host are allowed; ``"warn"`` or 1:
            each gives a `UserWarning` that names the line; ``"error"`` or 2: each raises a
            `RuntimeError`.

    Raises:
        RuntimeError: Another mode.

    Example:
        >>> torch.tpu.set_sync_debug_mode("error")
        >>> loss.item()
        RuntimeError: called a synchronizing TPU operation: item(), float(), ...
    """
    level = _SYNC_DEBUG_MODES.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if level not in _SYNC_DEBUG_MODES.values():
        raise RuntimeError(
            f"invalid value of debug_mode, {debug_mode!r}: expected one of `default`, `warn`, "
            "`error`"
        )
    from tpu_core import host_reads, runtime, tiers

    client = runtime.runtime().client
    host_reads.set_debug_level(level)
    tiers.pin_to_programs(level > 0, client)


def get_sync_debug_mode() -> int:
    """The mode that `set_sync_debug_mode` has set, as a number: 0, 1 or 2."""
    from tpu_core import host_reads

    return host_reads.debug_level()


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Override `torch.set_float32_matmul_precision` for a block of this thread.

    Args:
        name: ``"highest"`` (float32), ``"high"`` (three bfloat16 passes on a TPU) or ``"medium"``
            (one).

    Raises:
        ValueError: Another name.
    """
    from tpu_core import _C
    from tpu_core.lowering import precision as lowering_precision

    before = lowering_precision._override.get()
    with lowering_precision.precision(name):
        _C.set_thread_precision(_CODES[name])
        try:
            yield
        finally:
            _C.set_thread_precision(-1 if before is None else _CODES.get(before, -1))

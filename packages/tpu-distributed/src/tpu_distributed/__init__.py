"""Collectives for device ``tpu``, plugged into ``torch.distributed`` by an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpu_distributed._version import __version__ as __version__

if TYPE_CHECKING:
    from tpu_distributed.comm_hooks import bf16_compression_hook as bf16_compression_hook
    from tpu_distributed.flight_records.recorder import FlightRecorder
    from tpu_distributed.prefetching import prefetch as prefetch
    from tpu_distributed.spmd_region import spmd as spmd
    from tpu_distributed.torus import torus_order as torus_order

__all__ = [
    "__version__",
    "bf16_compression_hook",
    "flight_recorder",
    "prefetch",
    "spmd",
    "torus_order",
]


def flight_recorder() -> FlightRecorder:
    """The last collectives of this process, and where each got to.

    They are written to a file when a collective fails; ``tpu flights`` shows the files of all
    ranks as one table and says where they differ.

    Example:
        >>> tpu_distributed.flight_recorder().dump("flights")
        PosixPath('flights/rank-0.json')
    """
    from tpu_distributed.flight_records.recorder import RECORDER

    return RECORDER


def __getattr__(name: str) -> Any:
    # Found when it is used: `import torch` imports this package.
    if name == "prefetch":
        from tpu_distributed.prefetching import prefetch

        return prefetch
    if name == "bf16_compression_hook":
        from tpu_distributed.comm_hooks import bf16_compression_hook

        return bf16_compression_hook
    if name == "spmd":
        from tpu_distributed.spmd_region import spmd

        return spmd
    if name == "torus_order":
        from tpu_distributed.torus import torus_order

        return torus_order
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

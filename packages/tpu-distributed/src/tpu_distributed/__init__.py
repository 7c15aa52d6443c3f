"""Collectives for device ``tpu``, plugged into ``torch.distributed`` by an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_distributed._version import __version__ as __version__

if TYPE_CHECKING:
    from tpu_distributed.flights.recorder import FlightRecorder

__all__ = ["__version__", "flight_recorder"]


def flight_recorder() -> FlightRecorder:
    """The last collectives of this process, and where each got to.

    They are written to a file when a collective fails; ``tpu flights`` shows the files of all
    ranks as one table and says where they differ.

    Example:
        >>> tpu_distributed.flight_recorder().dump("flights")
        PosixPath('flights/rank-0.json')
    """
    from tpu_distributed.flights.recorder import RECORDER

    return RECORDER

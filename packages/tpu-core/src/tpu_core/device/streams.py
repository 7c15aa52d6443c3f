"""Streams and events. A device runs in one order, so every stream is the same queue."""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C
from tpu_core.device.devices import _index


class Stream(torch.Stream):
    """A stream of the device. Streams exist so that programs written for several of them work.

    Args:
        device: Its device; the current one unless given.
        priority: Accepted and without effect.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Stream:
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=torch.device("tpu", _index(device)), priority=priority)


class Event(torch.Event):
    """A point in the device's queue that can be waited for and, with timing, subtracted.

    Args:
        enable_timing: Whether `elapsed_time` will be asked for.
        blocking, interprocess: Accepted and without effect.
    """

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, device="tpu", enable_timing=enable_timing)

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from this event to ``end_event``; both need ``enable_timing=True``."""
        # PyTorch's own method takes no subclass of torch.Event.
        if not isinstance(end_event, torch.Event):
            raise TypeError(f"elapsed_time takes an event, not {type(end_event).__name__}.")
        return float(_C.event_elapsed(self, end_event))


def _ours(s: torch.Stream) -> Stream:
    return Stream(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)


def current_stream(device: Any = None) -> Stream:
    """The current stream of a device."""
    return _ours(torch.accelerator.current_stream(torch.device("tpu", _index(device))))


def default_stream(device: Any = None) -> Stream:
    """The default stream of a device, stream 0."""
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload] # an enum
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def is_current_stream_capturing() -> bool:
    """Return whether ops of this thread on the current device are captured in a graph.

    Example:
        >>> torch.tpu.is_current_stream_capturing()
        False
    """
    return _C.is_initialized() and _C.is_capturing(_C.current_device())


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream the current one of its device."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class stream:
    """Context manager that makes a stream the current one; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: torch.Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        set_stream(self._before)

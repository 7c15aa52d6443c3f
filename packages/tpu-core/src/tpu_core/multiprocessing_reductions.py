"""Tensors of the device on their way to another process: an error that says what to send.

The memory of a PJRT client belongs to its process, and `torch.multiprocessing` sends handles of
memory, not bytes. Its own reducers end in an error about file descriptors, and behind a
`multiprocessing.Queue` that error is lost: ``put()`` returns, a thread of the queue pickles, prints
the traceback, and the reader waits for ever. Here the error travels in place of the message and is
raised in the reader's ``get()``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import queues
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FrameType
from typing import Any

import torch
from torch.multiprocessing import reductions

from tpu_core.errors import ProcessSharingError

_FEED = queues.Queue._feed.__code__  # type: ignore[attr-defined]  # runs in a queue's own thread


def register() -> None:
    """Register reducers for `ForkingPickler`, which all of `multiprocessing` pickles with."""
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    ForkingPickler.register(torch.nn.Parameter, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "tpu":
        return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _refuse(f"A tensor on '{tensor.device}'", {"tensor": f"{dtype}{list(tensor.shape)}"})


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "tpu":
        return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    return _refuse(f"A storage on '{storage.device}'", {"bytes": storage.nbytes()})


def _refuse(what: str, values: dict[str, object]) -> tuple[Callable[[str], Any], tuple[str]]:
    """Raise; in the thread of a queue, a reduction that raises where it is unpickled."""
    error = ProcessSharingError(
        f"{what} cannot be sent to another process.",
        values=values,
    )
    # Queues with a handler of their own, such as those of concurrent.futures, pass the error on.
    feeder = _frame_of(_FEED)
    handler = feeder and feeder.f_locals.get("onerror")
    if handler is not queues.Queue._on_queue_feeder_error:  # type: ignore[attr-defined]
        raise error
    return _raise_at_reader, (str(error),)


def _raise_at_reader(message: str) -> Any:
    from torch.utils.data._utils import pin_memory

    error = ProcessSharingError(message)
    # An error in that thread's get() would end the thread with the DataLoader none the wiser; one
    # of pin_memory() is passed on.
    if _frame_of(pin_memory._pin_memory_loop.__code__):
        return _Refused(error)
    raise error


class _Refused:
    """Stands for a tensor in a message, and raises where it is used."""

    def __init__(self, error: ProcessSharingError) -> None:
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["error"]


def _frame_of(code: CodeType) -> FrameType | None:
    """The frame of this thread that runs a function, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame

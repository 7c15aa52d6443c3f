"""Values of tensors on the device: their state, and values that another thread fills in."""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C


class DeviceValue:
    """The value that the storage of a tensor on the device holds.

    Args:
        tensor: A tensor on ``tpu``.

    Example:
        >>> DeviceValue(torch.ones(3, device="tpu") + 1).state
        'pending'
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def state(self) -> str:
        """``"host"``: bytes that were not copied yet; ``"pending"``: the result of a recorded op;
        ``"running"``; else an array that is there.
        """
        return _C.state(self._tensor)

    @property
    def is_whole(self) -> bool:
        """True if the tensor is all of its storage, in its order."""
        return _C.is_whole(self._tensor)

    def array(self, reason: str) -> Any:
        """The device array; what it depends on is sent to the device, and not waited for.

        Args:
            reason: Reason of the segment's end, for `torch.tpu.compile_report`: ``"prefetch"``.

        Raises:
            TpuError: The program that computes it cannot be compiled.
        """
        return _C.value_array(self._tensor, reason)

    def operand(self) -> Any:
        """A hold on the value as it now is, for a thread that reads it later.

        Returns:
            An object with ``array()``, which waits until a program has been sent for it,
            ``is_last_use()``: whether nothing else will read it, and ``release()``.
        """
        return _C.Operand(self._tensor)

    def promise(self) -> Any:
        """A new value for the tensor, that another thread fills in.

        Returns:
            An object with ``keep(array)``, ``fail(error)`` and ``end(take_back)``; None where the
            tensor shares its storage with others, so that it cannot be replaced.
        """
        return _C.promise(self._tensor)


def flush(device: int, reason: str) -> None:
    """Send what all threads have recorded for a device.

    Args:
        device: Index of the device; -1 for all.
        reason: Reason, for `torch.tpu.compile_report`.

    Example:
        >>> flush(-1, "collective")
    """
    _C.flush_all(device, reason)


def user_line() -> str:
    """The innermost line of the user's code in this thread, ``train.py:12``; "" outside of any.

    Example:
        >>> record.line = user_line()
    """
    return _C.user_line()

"""Collective executors: device or host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tpu_core.extend import Loaded, runtime
from tpu_distributed.connections import Reduced
from tpu_distributed.flight_records.recorder import Record
from tpu_distributed.reductions import Reduction
from tpu_distributed.rendezvous import Rendezvous

_REDUCED_BY_HOSTS = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
# From here on new memory costs more than a program that takes over that of the operand.
_IN_PLACE_BYTES = 1 << 22


class CollectiveExecutor(Protocol):
    """Executor of collectives of one kind and shape."""

    def payload(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """Payload of the operands in the message of the preflight check."""

    def run(
        self,
        arrays: Sequence[Any],
        takes: bool,
        payloads: Sequence[np.ndarray[Any, Any]],
        record: Record,
    ) -> list[Any]:
        """Carry one out, now that the ranks agree.

        Args:
            arrays: Operands.
            takes: Whether nothing else will read them.
            payloads: Those of all ranks, where there are some.
            record: Of the call.

        Returns:
            Arrays of the results.
        """


@dataclass(frozen=True)
class OnDevices:
    """A program that the devices of the group run together."""

    program: Loaded

    def payload(self, arrays: Sequence[Any]) -> None:
        """Nothing: the devices have connections of their own."""

    def run(
        self,
        arrays: Sequence[Any],
        takes: bool,
        payloads: Sequence[np.ndarray[Any, Any]],
        record: Record,
    ) -> list[Any]:
        """Give it to the device."""
        results = self.program.execute(list(arrays))
        return list(results.consume_with_handlers(self.program.handlers))


class HostExecutor:
    """An all_reduce of one array that is in the host's memory, over connections of our own.

    XLA:CPU copies what it reduces, and takes two to three times as long. A small array travels with
    the message by which the ranks agree.

    Args:
        control: The group's connection.
        reduction: Reduction, which it `serves`.
        like: A tensor of its size and dtype.
        take: Gives a program that does nothing, in its operand's memory.
        device: That of this process.
    """

    def __init__(
        self,
        control: Rendezvous,
        reduction: Reduction,
        like: torch.Tensor,
        take: Callable[[], Loaded],
        device: Any,
    ) -> None:
        self._control, self._reduction, self._device = control, reduction, device
        self._elements, self._dtype = like.numel(), like.dtype
        self._is_payload = like.nbytes <= control.payload_bytes
        self._take = take() if like.nbytes >= _IN_PLACE_BYTES else None

    @staticmethod
    def serves(reduction: Reduction, dtype: torch.dtype) -> bool:
        """Return whether hosts can do it, with the results that a device gives."""
        if reduction.name == "AVG" or reduction.name == "PREMUL_SUM":
            return dtype in _REDUCED_BY_HOSTS and dtype.is_floating_point
        return dtype in _REDUCED_BY_HOSTS and reduction.on_host is not None

    def payload(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """The array, if it is small."""
        return np.asarray(arrays[0]) if self._is_payload else None

    def run(
        self,
        arrays: Sequence[Any],
        takes: bool,
        payloads: Sequence[np.ndarray[Any, Any]],
        record: Record,
    ) -> list[Any]:
        """Reduce it, and return when that is done."""
        if self._is_payload:
            result = self._reduction.of_rows(payloads)
            return [runtime().client.put(result, self._device)]
        (array,) = arrays
        if takes and self._take is not None:
            # The program waits for those that still read the memory.
            (array,) = self._take.execute([array]).consume_with_handlers(self._take.handlers)
            place = _address(array)
            self._control.all_reduce(record, self._reduced(place, place))
            return [array]
        out = np.empty(array.shape, array.dtype)
        addresses = _address(array), out.__array_interface__["data"][0]
        self._control.all_reduce(record, self._reduced(*addresses))
        return [runtime().client.put(out, self._device)]

    def _reduced(self, source: int, out: int) -> Reduced:
        name = self._reduction.on_host
        assert name is not None  # as `serves` has seen
        divisor = self._control.size if self._reduction.name == "AVG" else 1
        factor = self._reduction.factor
        return Reduced(source, out, self._elements, self._dtype, name, factor, divisor)


def _address(array: Any) -> int:
    """Address of a CPU device's array in memory; waits for it."""
    return int(array.block_until_ready().unsafe_buffer_pointer())

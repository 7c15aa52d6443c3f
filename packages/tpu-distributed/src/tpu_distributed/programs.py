"""What carries a collective out once its turn has come: the devices, or on a CPU the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.utils.dlpack import from_dlpack

from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.client import Loaded
from tpu_distributed.control import Control
from tpu_distributed.flights.recorder import Record
from tpu_distributed.reductions import Reduction

_REDUCED_BY_GLOO = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}


class Carrier(Protocol):
    """Carries collectives of one kind and shape out."""

    def payload(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """What of the operands travels with the message by which the ranks agree."""

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


class OnHosts:
    """An all_reduce of one array that is in the host's memory: PyTorch's gloo reduces it in place.

    XLA:CPU copies what it reduces, and takes two to three times as long. A small array travels with
    the message by which the ranks agree.

    Args:
        control: The group's connection.
        reduction: What to do.
        nbytes: Size of the array.
        take: Gives a program that does nothing, in its operand's memory.
        device: That of this process.
    """

    def __init__(
        self,
        control: Control,
        reduction: Reduction,
        nbytes: int,
        take: Callable[[], Loaded],
        device: Any,
    ) -> None:
        self._control, self._reduction, self._device = control, reduction, device
        self._take = None if nbytes <= control.payload_bytes and control.size > 1 else take()

    @staticmethod
    def serves(reduction: Reduction, dtype: torch.dtype) -> bool:
        """Whether gloo can do it, with the results that a device gives."""
        if reduction.name == "AVG" or reduction.name == "PREMUL_SUM":
            return dtype in _REDUCED_BY_GLOO and dtype.is_floating_point
        return dtype in _REDUCED_BY_GLOO and reduction.on_host is not None

    def payload(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """The array, if it is small."""
        return np.asarray(arrays[0]) if self._take is None else None

    def run(
        self,
        arrays: Sequence[Any],
        takes: bool,
        payloads: Sequence[np.ndarray[Any, Any]],
        record: Record,
    ) -> list[Any]:
        """Reduce it, and return when that is done."""
        if self._take is None:
            result = self._reduction.of_rows(payloads)
            return [pjrt.put(result, self._device)]
        if takes:
            # The program waits for those that still read the memory.
            (array,) = self._take.execute(list(arrays)).consume_with_handlers(self._take.handlers)
            array.block_until_ready()
            memory = from_dlpack(array.__dlpack__())
        else:
            memory = from_dlpack(arrays[0].block_until_ready().__dlpack__()).clone()
            array = None
        if self._reduction.name == "PREMUL_SUM":
            memory *= self._reduction.factor
        if self._control.size > 1:
            options = AllreduceOptions()
            options.reduceOp = self._reduction.on_host
            with self._control.errors(record):
                self._control.gloo.allreduce([memory], options).wait()
        if self._reduction.name == "AVG":
            memory /= self._control.size
        return [pjrt.put_tensor(memory, self._device) if array is None else array]

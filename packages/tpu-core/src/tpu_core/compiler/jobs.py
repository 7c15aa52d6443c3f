"""Jobs for processes that compile: a segment as it travels, and what they make of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tpu_core.compiler import segment as segments
from tpu_core.compiler.segment import Segment
from tpu_core.pjrt import client as pjrt


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A segment to compile, which can be pickled.

    Attributes:
        exported: As the extension exported it.
        module: Its StableHLO bytecode, where what its ops compute is known to this process alone.
        device: Index of its device.

    Example:
        >>> job = pickle.loads(data)  # in another process
        >>> job.open_device()
        >>> executable = job.compile()
    """

    exported: dict[str, Any] | None
    module: bytes | None
    device: int

    @classmethod
    def of(cls, segment: Segment, exported: dict[str, Any]) -> CompileJob:
        """The job of a segment, lowered here where no other process can.

        Args:
            segment: The segment.
            exported: As the extension exported it; the numbers compiled in are the segment's.
        """
        if any(n.plan is not None and n.plan.compute.is_local for n in segment.nodes):
            return cls(None, segments.lower(segment), segment.device)
        numbers = [(n.pack, n.compiled_in, n.value) for n in segment.numbers]
        return cls({**exported, "numbers": numbers}, None, segment.device)

    @staticmethod
    def open_device() -> None:
        """Open the first device of this process, if that was not done."""
        _own_client()

    def compile(self, client: pjrt.Client | None = None) -> bytes:
        """Lower and compile the segment; the serialized executable.

        Args:
            client: Has its device; None for the device of `open_device`.
        """
        module = self.module
        if module is None:
            assert self.exported is not None
            module = segments.lower(Segment.from_export(self.exported))
        device = 0 if client is None else self.device
        client = client or _own_client()
        return pjrt.serialize(pjrt.compile_module(module, client.devices[device], client))


@functools.cache
def _own_client() -> pjrt.Client:
    return pjrt.start()

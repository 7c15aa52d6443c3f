"""Compiles programs of the eager modes for a TPU topology, for ``tpu cache warm --topology``."""

from __future__ import annotations

from tpu_compile.aot.chips import parse_topology
from tpu_compile.aot.process import compile_program, require_libtpu
from tpu_core.errors import TopologyCompilationError


class SegmentCompiler:
    """A `tpu_core.compiler.cross_compile.TopologyCompiler` that is libtpu in a process of its own.

    Args:
        topology: As `tpu_compile.aot` takes it; programs are for its first device.

    Raises:
        LibtpuMissingError: libtpu is not installed.
        UnknownTopologyError: There is no such topology.
    """

    device = 0

    def __init__(self, topology: str) -> None:
        require_libtpu()
        self._topology = parse_topology(topology)
        self.kind = self._topology.chip.kind

    def compile(self, module: bytes) -> tuple[bytes, str]:
        """Compile StableHLO bytecode for the first device.

        Returns:
            The serialized executable, and libtpu's version.

        Raises:
            TopologyCompilationError: libtpu refused the program, or it does not fit.
        """
        outcome = compile_program(module, self._topology, {"device": 1})
        if outcome.out_of_memory:
            raise TopologyCompilationError(
                f"The program does not fit {self._topology.name}: {outcome.out_of_memory}"
            )
        return outcome.executable, outcome.platform_version

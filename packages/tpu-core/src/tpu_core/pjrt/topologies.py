"""Ahead-of-time compilation for TPU topologies, through libtpu and jaxlib's private API.

Imports nothing of this package: the process that libtpu runs in loads this file alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import mesh_utils, topologies

from tpu_core.pjrt.client import set_aliases


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a program with libtpu, for one device.

    Attributes:
        text: The optimized, scheduled HLO.
        memory: Sizes in bytes: ``argument``, ``output``, ``alias``, ``temp``, ``generated_code``
            and ``peak``.
        cost: XLA's cost analysis; what is in a loop is counted once.
        executable: Machine code.
        platform_version: Of libtpu.
    """

    text: str
    memory: dict[str, int]
    cost: dict[str, float]
    executable: bytes
    platform_version: str


def compile_for_topology(module: bytes, topology: str, mesh: Mapping[str, int]) -> Compiled:
    """Compile StableHLO with Shardy annotations. Needs `LibtpuTopology.ENVIRONMENT`; may end
    the process.

    Args:
        module: Bytecode.
        topology: As libtpu names it, ``"v5e:2x2"``.
        mesh: Size of each axis; they multiply to the number of devices, the first of the topology.

    Raises:
        RuntimeError: libtpu's message.
    """
    shape = topology.partition(":")[2].split("x")
    # A slice of less than a host has to say so.
    single = {"chips_per_host_bounds": [1, 1, 1]} if set(shape) == {"1"} else {}
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology, **single)
    devices: Any = description.devices[: math.prod(mesh.values())]
    client = devices[0].client
    executable = client.compile(
        _parse(module),
        executable_devices=xla_client.DeviceList(tuple(devices)),
        compile_options=_options(devices, tuple(mesh.values())),
    )
    stats = executable.get_compiled_memory_stats()
    names = ("argument", "output", "alias", "temp", "generated_code")
    memory = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}
    memory["peak"] = int(stats.peak_memory_in_bytes)
    cost = {k: float(v) for k, v in dict(executable.cost_analysis()).items()}
    return Compiled(
        executable.hlo_modules()[0].to_string(),
        memory,
        cost,
        bytes(executable.serialize()),
        client.platform_version,
    )


def _parse(module: bytes) -> Any:
    with mlir.make_ir_context():
        return ir.Module.parse(module)


def _options(devices: Any, shape: tuple[int, ...]) -> Any:
    options = xla_client.CompileOptions()
    count = math.prod(shape)
    assigned = LibtpuTopology.ordered(devices, shape).reshape(1, -1)
    ids = np.vectorize(lambda device: device.id, otypes=[np.int64])(assigned)
    options.num_replicas, options.num_partitions = 1, count
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, count
    build.use_spmd_partitioning = count > 1
    build.use_shardy_partitioner = True
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    return options


class LibtpuTopology:
    """The compiler of libtpu for a topology of TPUs, none of which need be there.

    What it compiles is run by a process with such TPUs: `load`.

    Args:
        topology: As libtpu names it, ``"v5e:2x2"``.

    Attributes:
        ENVIRONMENT: Environment of a process that compiles without TPUs.

    Example:
        >>> os.environ.update(LibtpuTopology.ENVIRONMENT)
        >>> LibtpuTopology("v5e:2x2").device().device_kind
        'TPU v5 lite'
    """

    # Needed by libtpu where there is no TPU: no question to a metadata server, no lock of the one
    # TPU of the machine; the other two keep its log short.
    ENVIRONMENT: Final[Mapping[str, str]] = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "JAX_PLATFORMS": "cpu",
    }

    def __init__(self, topology: str) -> None:
        self.topology = topology

    def device(self) -> Any:
        """A device to compile for, of a topology of whole hosts. Needs `ENVIRONMENT`."""
        description = topologies.get_topology_desc(platform="tpu", topology_name=self.topology)
        return description.devices[0]

    @staticmethod
    def ordered(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Devices as a mesh whose axes lie along the links of their torus, where they can.

        Args:
            devices: JAX devices, as many as the mesh has.
            shape: Of the mesh; the last axes communicate most.

        Example:
            >>> LibtpuTopology.ordered(jax.devices(), (4, 2)).shape
            (4, 2)
        """
        try:
            return np.asarray(mesh_utils.create_device_mesh(shape, list(devices)))
        except (NotImplementedError, ValueError, AssertionError):
            # An axis that fits no product of dimensions, or v4 by cores, which jax knows by chips:
            # ids count the positions in the torus, line by line.
            by_id = sorted(devices, key=lambda device: int(device.id))
            return np.array(by_id, dtype=object).reshape(shape)

    @staticmethod
    def module_bytes(lowered: Any, aliases: Mapping[int, int]) -> bytes:
        """StableHLO bytecode of a lowered jax function, with the names of its scopes.

        Args:
            lowered: From ``jax.jit(...).trace(...).lower(...)``.
            aliases: For arguments whose memory an output takes, the output.

        Example:
            >>> lowered = jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
            >>> module = LibtpuTopology.module_bytes(lowered, {0: 0})
        """
        module = lowered.compiler_ir("stablehlo")
        set_aliases(module, aliases)
        return mlir.module_to_bytecode(module)

    @staticmethod
    def load(executable: bytes, devices: Any, mesh: Mapping[str, int]) -> Any:
        """An executable that was compiled for a topology, on real devices. Untested on hardware.

        Args:
            executable: Machine code.
            devices: JAX devices of this process.
            mesh: Size of each axis that it was compiled for.

        Example:
            >>> LibtpuTopology.load(executable, runtime().client.devices, {"data": 4})
        """
        options = _options(devices, tuple(mesh.values()))
        return devices[0].client.deserialize_executable(
            executable, xla_client.DeviceList(tuple(devices)), options
        )

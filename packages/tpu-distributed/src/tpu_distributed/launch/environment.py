"""The environment variables by which libtpu gives a process its chip and finds the others.

libtpu starts with all chips of a host unless told otherwise. For one process a chip, each needs its
number, its port and the addresses of all processes of the slice; slices find each other by
``MEGASCALE_*``.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from tpu_core.errors import ProcessGroupError
from tpu_core.extend import Platform
from tpu_distributed.launch import slices
from tpu_distributed.launch.slices import Slice

# Of the first process of a host; the others have the next ones.
PORT = 8476
MEGASCALE_PORT = 8081


@dataclass(frozen=True)
class LaunchSpec:
    """The hosts of a program.

    Attributes:
        slice: One of its slices; all are alike.
        hosts: Names of all hosts, slice after slice.
    """

    slice: Slice
    hosts: tuple[str, ...]

    @property
    def slices(self) -> int:
        """Number of slices."""
        return len(self.hosts) // self.slice.hosts

    def host_environment(self, node: int) -> dict[str, str]:
        """Environment variables that all processes of a host share.

        Args:
            node: Number of the host among all.
        """
        number, worker = divmod(node, self.slice.hosts)
        first = number * self.slice.hosts
        shape, host = self.slice.shape, self.slice.host
        found = {
            "TPU_WORKER_ID": str(worker),
            "TPU_WORKER_HOSTNAMES": ",".join(self.hosts[first : first + self.slice.hosts]),
            "TPU_CHIPS_PER_HOST_BOUNDS": ",".join(map(str, host)),
            "TPU_HOST_BOUNDS": ",".join(str(n // h) for n, h in zip(shape, host)),
        }
        if self.slices > 1:
            found["MEGASCALE_NUM_SLICES"] = str(self.slices)
            found["MEGASCALE_SLICE_ID"] = str(number)
            found["MEGASCALE_COORDINATOR_ADDRESS"] = f"{self.hosts[0]}:{MEGASCALE_PORT}"
        return found


def process_environment(slice: Slice, host: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Environment variables of one process of a host.

    Args:
        slice: The slice that the host is in.
        host: The host's own environment: ``TPU_WORKER_ID``, ``TPU_WORKER_HOSTNAMES``, ...
        local_rank: Number of the process, and of its chip, on the host.
    """
    count = slice.chips_per_host
    names = [name for name in host.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    names = names if slice.hosts > 1 else ["localhost"]
    worker = int(host.get("TPU_WORKER_ID") or 0)
    found = {
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": ",".join(map(str, slice.shape)),
        "TPU_PROCESS_ADDRESSES": ",".join(
            f"{name}:{PORT + process}" for name in names for process in range(count)
        ),
        "TPU_PROCESS_PORT": str(PORT + local_rank),
        "CLOUD_TPU_TASK_ID": str(worker * count + local_rank),
    }
    if int(host.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        found["MEGASCALE_PORT"] = str(MEGASCALE_PORT + local_rank)
    return found


def settle(environ: MutableMapping[str, str], chips: int) -> None:
    """Give this process its chip, where torchrun has started one for each chip of the host.

    What is set already stays: a process with ``TPU_VISIBLE_CHIPS`` is left alone, and so is one
    that is alone on its host.

    Args:
        environ: The process' environment, which is changed. It must be before libtpu starts.
        chips: Number of chips of this host.

    Raises:
        ProcessGroupError: There are more processes than chips, or fewer.
    """
    processes = int(environ.get("LOCAL_WORLD_SIZE") or 1)
    if "TPU_VISIBLE_CHIPS" in environ or processes == 1:
        return
    if processes != chips:
        raise ProcessGroupError(
            f"{processes} processes were started on a host with {chips} TPU chips.",
            remedy="Start one for each chip: torchrun --nproc-per-node=auto. To use some of the "
            "chips only, set TPU_VISIBLE_CHIPS and the TPU_PROCESS_* variables yourself.",
        )
    slice = slices.from_environment(environ, chips)
    if slice is None or slice.chips_per_host != chips:
        raise ProcessGroupError(
            "The environment does not say which slice of TPUs this host is in.",
            values={name: environ.get(name, "not set") for name in _SLICE_VARIABLES},
            remedy="Start the program by `tpu launch --topology ...`, which sets them.",
        )
    for name, value in process_environment(slice, environ, int(environ["LOCAL_RANK"])).items():
        environ.setdefault(name, value)


_SLICE_VARIABLES: Sequence[str] = (
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
)


def settle_process(environ: MutableMapping[str, str]) -> None:
    """`settle` where the platform is a TPU; elsewhere nothing."""
    if Platform.resolve().name == "tpu" and (chips := Platform.find_chips().count):
        settle(environ, chips)

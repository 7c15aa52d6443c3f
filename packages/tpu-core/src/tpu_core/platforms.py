"""The PJRT platform behind the device ``tpu``, selected without jax and without libtpu.

Asking libtpu costs seconds and prints to stderr where there is no TPU, so only files and
environment variables are looked at.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_core.config import config
from tpu_core.errors import TpuNotAvailableError

_GOOGLE = "0x1ae0"
# PCI device ids of TPUs, after jax/_src/hardware_utils.py: generation, and JAX devices a chip (the
# two cores of v2, v3 and 7x are devices of their own). Google's virtual network and disk devices
# carry the same vendor id, so the vendor alone says nothing.
_TPU_IDS = {
    "0x0027": ("v3", 2),
    "0x005e": ("v4", 1),
    "0x0062": ("v5p", 1),
    "0x0063": ("v5e", 1),
    "0x006f": ("v6e", 1),
    "0x0076": ("7x", 2),
}
# Both are set on a TPU VM and in its containers; ahead-of-time compilation sets only the first.
_VM_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")


@dataclass(frozen=True)
class Platform:
    """The platform chosen, and why.

    Attributes:
        name: PJRT platform: ``"tpu"``, ``"cpu"``, or a plug-in's name.
        reason: One sentence for ``tpu doctor``.
        device_kind_hint: Generation of the chips (``"TPU v5e"``), where the PCI bus tells.

    Example:
        >>> Platform.resolve().name, Platform.find_chips().count
        ('tpu', 4)
    """

    name: str
    reason: str
    device_kind_hint: str | None = None

    @staticmethod
    def resolve() -> Platform:
        """The platform of this process, decided without starting it in less than a millisecond.

        Returns:
            ``TPU_PLATFORM`` where it is set; else ``"tpu"`` where libtpu and a chip are there; else
            ``"cpu"``.

        Raises:
            TpuNotAvailableError: ``TPU_PLATFORM=tpu`` without a chip or without libtpu.
            ConfigurationError: A ``TPU_*`` variable is not valid.
        """
        wanted = config().platform
        if wanted not in (None, "tpu"):
            return Platform(wanted, f"TPU_PLATFORM={wanted}")
        chips = _chips()
        if wanted == "tpu":
            if not (chips.visible and chips.libtpu):
                raise _not_available(chips)
            return Platform("tpu", "TPU_PLATFORM=tpu", chips.kind)
        if not chips.visible:
            return Platform("cpu", "no TPU chip is visible")
        if not chips.libtpu:
            return Platform("cpu", "a TPU chip is visible, but libtpu is not installed", chips.kind)
        found = (
            f"{chips.count} chips are visible" if chips.count else "the environment is a TPU VM's"
        )
        return Platform("tpu", f"{found} and libtpu is installed", chips.kind)

    @staticmethod
    def find_chips(
        environ: Mapping[str, str] | None = None, root: str | os.PathLike[str] = "/"
    ) -> Chips:
        """TPU chips and libtpu of this machine; reads a few files and imports nothing.

        Args:
            environ: The environment; that of the process by default.
            root: Root of the file system.
        """
        environ = os.environ if environ is None else environ
        root = Path(root)
        accel = _numbered(root / "dev", "accel")
        pci = _pci_chips(root)
        return Chips(
            device_files=accel or _numbered(root / "dev" / "vfio", ""),
            pci=tuple(kind for kind, _ in pci),
            devices_per_chip=pci[0][1] if pci else 1,
            vm=all(environ.get(name) for name in _VM_VARIABLES),
            libtpu=_find_libtpu(environ),
        )


@dataclass(frozen=True)
class Chips:
    """Chips found on the machine.

    Attributes:
        device_files: ``/dev/accel*``, or the VFIO groups where there are none.
        pci: Generations of the TPU chips on the PCI bus, one item a chip.
        devices_per_chip: JAX devices of one chip.
        vm: Whether the environment is that of a TPU VM.
        libtpu: Path of libtpu, or None.
    """

    device_files: tuple[str, ...]
    pci: tuple[str, ...]
    devices_per_chip: int
    vm: bool
    libtpu: str | None

    @property
    def count(self) -> int:
        """Number of chips that this process can open."""
        accel = [f for f in self.device_files if Path(f).name.startswith("accel")]
        if accel:
            return len(accel)
        # A VFIO group may hold any device, so it counts only as far as the bus shows TPUs.
        return min(len(self.device_files), len(self.pci))

    @property
    def visible(self) -> bool:
        """True if a chip can be used, as far as can be told without libtpu."""
        return self.count > 0 or self.vm

    @property
    def kind(self) -> str | None:
        """Generation of the chips, ``"TPU v5e"``."""
        return f"TPU {self.pci[0]}" if self.pci else None

    def describe(self) -> str:
        """Description of the search and its result, in one line."""
        files = ", ".join(self.device_files) or "none"
        bus = f"{len(self.pci)} ({self.kind})" if self.pci else "none"
        return (
            f"device files /dev/accel*, /dev/vfio/*: {files}; TPU chips on the PCI bus: {bus}; "
            f"TPU VM environment ({', '.join(_VM_VARIABLES)}): {'yes' if self.vm else 'no'}; "
            f"libtpu: {self.libtpu or 'not found'}"
        )


def _chips() -> Chips:
    """`Platform.find_chips` of this process, remembered: PyTorch often asks for the count."""
    names = (*_VM_VARIABLES, "TPU_LIBRARY_PATH")
    return _remembered(tuple((name, os.environ.get(name, "")) for name in names))


@functools.lru_cache(maxsize=8)
def _remembered(environ: tuple[tuple[str, str], ...]) -> Chips:
    return Platform.find_chips(dict(environ))


def _numbered(folder: Path, prefix: str) -> tuple[str, ...]:
    # glob's character class keeps out /dev/vfio/vfio and /dev/accel/, which is Linux's own
    # accelerator subsystem.
    names = (Path(p).name for p in glob.glob(f"{glob.escape(str(folder))}/{prefix}[0-9]*"))
    numbers = sorted(int(n[len(prefix) :]) for n in names if n[len(prefix) :].isdigit())
    return tuple(f"{folder}/{prefix}{n}" for n in numbers)


def _pci_chips(root: Path) -> list[tuple[str, int]]:
    chips = []
    for vendor in sorted(glob.glob(f"{glob.escape(str(root))}/sys/bus/pci/devices/*/vendor")):
        try:
            if Path(vendor).read_text().strip() != _GOOGLE:
                continue
            device = Path(vendor).with_name("device").read_text().strip()
        except OSError:
            continue
        if device in _TPU_IDS:
            chips.append(_TPU_IDS[device])
    return chips


def _find_libtpu(environ: Mapping[str, str]) -> str | None:
    path = environ.get("TPU_LIBRARY_PATH")
    if path:
        return path if Path(path).exists() else None
    # find_spec of a top-level package does not import it.
    spec = importlib.util.find_spec("libtpu")
    if spec is None:
        return None
    return next(iter(spec.submodule_search_locations or []), spec.origin)


def _not_available(chips: Chips) -> TpuNotAvailableError:
    if chips.visible:
        what = "TPU_PLATFORM=tpu, but libtpu is not installed."
        remedy = (
            'Install it with pip install "jax[tpu]", or set TPU_LIBRARY_PATH to a libtpu.so that '
            "exists. Unset TPU_PLATFORM to run on the CPU."
        )
    else:
        what = "TPU_PLATFORM=tpu, but no TPU chip is visible."
        remedy = "Run on a TPU VM, or unset TPU_PLATFORM to run on the CPU."
        if chips.pci:
            remedy = (
                "The PCI bus shows a TPU, but its device files are not there: start the container "
                "with --privileged, or pass /dev/accel* or /dev/vfio on with --device. "
            ) + "Unset TPU_PLATFORM to run on the CPU."
    return TpuNotAvailableError(what, values={"looked for": chips.describe()}, remedy=remedy)


def device_count() -> int:
    """Number of devices ``tpu:0`` .. ``tpu:n-1``, told without starting anything.

    On the CPU ``TPU_NUM_DEVICES``; on TPUs the chips (twice that where a chip's two cores are
    devices); 1 for another platform until it is started. Under ``torchrun`` at least the number of
    processes on the machine: ``tpu:{local_rank}`` is the process' own device.
    ``TPU_VISIBLE_DEVICES`` is applied.
    0 where ``TPU_PLATFORM=tpu`` and there is no TPU: counting does not raise, using does.

    Raises:
        ConfigurationError: A ``TPU_*`` variable is not valid.
    """
    try:
        platform = Platform.resolve()
    except TpuNotAvailableError:
        return 0
    return len(visible_indices(_total(platform.name)))


def local_processes() -> int:
    """Number of processes that ``torchrun`` started on this machine, each with a device; else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _total(platform: str) -> int:
    if local_processes() > 1:
        return max(local_processes(), config().num_devices or 1)
    if platform == "cpu":
        return config().num_devices or 1
    if platform != "tpu":
        return 1
    chips = _chips()
    count = chips.count or _product(os.environ.get("TPU_CHIPS_PER_HOST_BOUNDS", "")) or 1
    if limited := os.environ.get("TPU_VISIBLE_CHIPS", "").strip():
        count = min(count, len(limited.split(",")))
    return count * chips.devices_per_chip


def _product(bounds: str) -> int:
    """Number of chips of a topology such as ``"2,2,1"``; 0 for what is not one."""
    if not re.fullmatch(r"\d+(,\d+)*", bounds):
        return 0
    total = 1
    for n in bounds.split(","):
        total *= int(n)
    return total


def visible_indices(total: int) -> list[int]:
    """Platform indices of ``tpu:0``, ``tpu:1``, ... out of ``total`` devices.

    As with ``CUDA_VISIBLE_DEVICES``, an index that does not exist ends the list.

    Example:
        >>> with override(visible_devices=(2, 0)):
        ...     visible_indices(4)
        [2, 0]
    """
    wanted = config().visible_devices
    if wanted is None:
        return list(range(total))
    indices: list[int] = []
    for index in wanted:
        if index >= total:
            break
        indices.append(index)
    return indices

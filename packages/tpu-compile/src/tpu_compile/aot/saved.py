"""Executables kept in files.

Untested on hardware: nothing here has run on a TPU. libtpu's compile-only client makes executables
but cannot load them, so that what is loaded was only ever made, never executed.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_core.errors import TpuNotAvailableError, VersionMismatchError


@dataclass(frozen=True)
class Saved:
    """A plan's file, read.

    Attributes:
        plan: The plan as `Plan.to_dict` gives it.
        executable: Machine code for the plan's topology and version of libtpu.
        stablehlo: The program, for another version to compile again.
        hlo: The optimized program.
    """

    plan: dict[str, Any]
    executable: bytes = field(repr=False)
    stablehlo: bytes = field(repr=False)
    hlo: str = field(repr=False)

    def to_devices(self) -> Any:
        """Load the executable onto this host's TPUs. Untested on hardware.

        Returns:
            PJRT's executable; its arguments are the plan's ``inputs`` in order, one part a device.

        Raises:
            TpuNotAvailableError: There is no TPU here.
            VersionMismatchError: It was made by another libtpu.
        """
        from tpu_core.extend import LibtpuTopology, runtime

        client = runtime().client
        if client.platform.name != "tpu":
            raise TpuNotAvailableError(
                f"An executable for {self.plan['topology']} needs TPUs, and this process runs on "
                f"'{client.platform.name}'.",
                values={"chosen by": client.platform.reason},
            )
        made, here = self.plan["platform_version"], client.backend.platform_version
        if made != here:
            raise VersionMismatchError(
                "The executable was made by another libtpu.",
                values={"made by": made, "installed": here},
                remedy="Compile it again with tpu_compile.aot under the installed libtpu.",
            )
        return LibtpuTopology.load(self.executable, client.devices, self.plan["mesh"])


def load(path: str | Path) -> Saved:
    """Read what `Plan.save` wrote. Untested on hardware beyond reading.

    An executable is machine code: load files from sources you trust only.

    Example:
        >>> tpu_compile.aot.load("step.tpu").plan["topology"]
        'v5e:2x2'
    """
    with zipfile.ZipFile(path) as archive:
        return Saved(
            json.loads(archive.read("plan.json")),
            archive.read("executable"),
            archive.read("program.mlirbc"),
            archive.read("program.hlo").decode(),
        )

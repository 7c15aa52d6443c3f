"""The plan: what a program needs of each device, and what it would cost to run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_compile.aot.costs import Cost, Roofline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Input:
    """One input of the program.

    Attributes:
        name: ``"blocks.*.up.weight"`` where the parameters of scanned layers are stacked.
        kind: ``"parameter"``, ``"buffer"``, ``"optimizer state"``, ``"batch"``, ``"random seed"``.
        shape, dtype: Of the whole tensor.
        spec: The mesh axis that divides each dimension.
        bytes: Of one device's part.
        padded_bytes: The same in tiles, as it lies in HBM.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...]
    bytes: int
    padded_bytes: int

    @property
    def waste(self) -> float:
        """Share of padding in what it takes."""
        return 1 - self.bytes / self.padded_bytes if self.padded_bytes else 0.0


@dataclass(frozen=True)
class Temporary:
    """A large result inside the program: its shape on one device, its bytes, its module."""

    shape: str
    bytes: int
    module: str


@dataclass(frozen=True)
class KernelUse:
    """An op of which there are several implementations: the one that was chosen.

    Attributes:
        op: As `tpu_kernels.using` names it.
        implementation: Name of the implementation.
        calls: In the program's text: what is in a loop counts once.
        why: Reason why it is not the one that would be tried first, or empty.
    """

    op: str
    implementation: str
    calls: int
    why: str


@dataclass(frozen=True)
class Memory:
    """HBM of one device, bytes.

    Attributes:
        capacity: Memory of the chip.
        total: Memory that the program needs.
        arguments, outputs, aliased, temporaries, code: Parts of ``total``; outputs that
            take the memory of arguments are ``aliased``. None where the program does not fit:
            libtpu then says the total alone.
        largest: Largest temporaries; not all live at once.
    """

    capacity: int
    total: int
    arguments: int | None = None
    outputs: int | None = None
    aliased: int | None = None
    temporaries: int | None = None
    code: int | None = None
    largest: tuple[Temporary, ...] = ()

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    @property
    def missing(self) -> int:
        """Bytes that it needs beyond what the chip has; 0 if it fits."""
        return max(0, self.total - self.capacity)


@dataclass(frozen=True)
class Plan:
    """Result of `tpu_compile.aot`. Printed with rich, it is a table; `_repr_html_` a page.

    Attributes:
        program: ``"forward"``, ``"forward and backward"`` or ``"training step"``.
        model: Class of the model.
        topology: Name, ``"v5e:2x2"``.
        mesh: Size of each axis.
        devices: Number of devices.
        inputs, outputs: Of the program.
        memory: HBM of one device.
        cost: Of one step on one device; None where the program does not fit.
        roofline: The least time of a step; None likewise.
        model_flops: Operations of the model's products in a step, on all devices together, without
            what is computed twice.
        mfu: Bound on the share of the devices' peak that they can reach.
        kernels: The implementations of ops that have several.
        scanned: Layers compiled as one: name and number.
        notes: Decisions and their reasons.
        advice: Changes that would make it smaller or faster.
        seconds: Wall time of each stage.
        platform_version: Of libtpu.
        executable: Machine code, empty where the program does not fit.
        stablehlo: The program.
        hlo: The optimized program.
    """

    program: str
    model: str
    topology: str
    mesh: Mapping[str, int]
    devices: int
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    memory: Memory
    cost: Cost | None
    roofline: Roofline | None
    model_flops: float
    mfu: float | None
    kernels: tuple[KernelUse, ...]
    scanned: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    seconds: Mapping[str, float]
    platform_version: str
    executable: bytes = field(default=b"", repr=False)
    stablehlo: bytes = field(default=b"", repr=False)
    hlo: str = field(default="", repr=False)

    @property
    def fits(self) -> bool:
        """True if the program fits into the device's memory."""
        return self.memory.fits

    def to_dict(self) -> dict[str, Any]:
        """Everything but the programs, of plain types."""
        programs = ("executable", "stablehlo", "hlo")
        made: dict[str, Any] = {
            k: asdict(v) if hasattr(v, "__dataclass_fields__") else v
            for k, v in vars(self).items()
            if k not in programs
        }
        made["inputs"] = [asdict(i) for i in self.inputs]
        made["kernels"] = [asdict(k) for k in self.kernels]
        made["memory"] |= {"fits": self.fits, "missing": self.memory.missing}
        if self.roofline is not None:
            made["roofline"] |= {"step": self.roofline.step, "bound": self.roofline.bound}
        return json.loads(json.dumps(made))

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def save_html(self, path: str | Path) -> Path:
        """Write the plan as a page for a browser."""
        from tpu_compile.aot.page import render

        path = Path(path)
        path.write_text(render([self]))
        return path

    def save(self, path: str | Path) -> Path:
        """Write plan, executable and programs to one file, for `tpu_compile.aot.load`.

        Raises:
            ValueError: There is no executable, as the program does not fit.
        """
        if not self.executable:
            raise ValueError(f"The program does not fit {self.topology}: there is no executable.")
        path = Path(path)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("plan.json", self.to_json())
            archive.writestr("executable", self.executable)
            archive.writestr("program.mlirbc", self.stablehlo)
            archive.writestr("program.hlo", self.hlo)
        return path

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from tpu_compile.aot.tables import tables

        yield from tables(self)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console as Terminal

        out = StringIO()
        Terminal(file=out, width=100, color_system=None).print(self)
        return out.getvalue()

    def _repr_html_(self) -> str:
        from tpu_compile.aot.page import render

        return render([self], whole_page=False)

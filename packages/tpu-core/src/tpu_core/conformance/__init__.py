"""The device contract: what PyTorch and its ecosystem ask of a third-party device, as one table.

``device_contract.toml`` drives three things: the test of ``torch.tpu``
(``tests/test_device_contract.py``), the docs page, and the list of what is not there yet.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

Priority = Literal["P0", "P1", "P2"]
Status = Literal["yes", "not yet"]
_TABLE = "device_contract.toml"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row of the contract.

    Attributes:
        id: Letter of the group and number, ``"A5"``.
        feature: Subject, in a few words.
        requirement: The requirement.
        priority: ``P0``: common programs break without it; ``P1``: expected; ``P2``: nice to have.
        status: Whether it is there.
        names: Attributes that ``torch.tpu`` must have.
        check: Name of the function in ``tests/device_contract`` that checks the behaviour; of
            another package, what does so in its tests.
        note: Advice, where it is not there.
        package: Has it.
    """

    id: str
    feature: str
    requirement: str
    priority: Priority
    status: Status
    names: tuple[str, ...] = ()
    check: str | None = None
    note: str | None = None
    package: str = "tpu-core"

    @property
    def group(self) -> str:
        """Letter of the group the row belongs to."""
        return self.id[0]


@dataclass(frozen=True, slots=True)
class Contract:
    """The whole table.

    Attributes:
        groups: Titles by letter, in the order of the page.
        requirements: All rows, in the order of the page.
    """

    groups: dict[str, str]
    requirements: tuple[Requirement, ...]

    def of_group(self, letter: str) -> tuple[Requirement, ...]:
        """Rows of one group."""
        return tuple(r for r in self.requirements if r.group == letter)


def parse(text: str) -> Contract:
    """Read a contract from TOML.

    Raises:
        ValueError: A row has an unknown group, priority, status or key, or an id is used twice.
    """
    data = tomllib.loads(text)
    groups: dict[str, str] = data["groups"]
    rows: list[Requirement] = []
    seen: set[str] = set()
    for row in data["requirement"]:
        where = f"{_TABLE}: row {row.get('id', '?')}"
        try:
            entry = Requirement(**{**row, "names": tuple(row.get("names", ()))})
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
        if entry.id in seen:
            raise ValueError(f"{where} appears twice.")
        if entry.group not in groups:
            raise ValueError(f"{where}: group {entry.group!r} is none of {', '.join(groups)}.")
        for value, literal in ((entry.priority, Priority), (entry.status, Status)):
            valid = get_args(literal)
            if value not in valid:
                raise ValueError(f"{where}: {value!r} is none of {', '.join(valid)}.")
        seen.add(entry.id)
        rows.append(entry)
    return Contract(groups, tuple(rows))


@cache
def device_contract() -> Contract:
    """The contract that comes with the package.

    Example:
        >>> {r.status for r in device_contract().of_group("A") if r.priority == "P0"}
        {'yes'}
    """
    return parse(files(__package__).joinpath(_TABLE).read_text())


def contract_page() -> str:
    """Markdown of ``docs/reference/device-contract.md``."""
    contract = device_contract()
    out = [
        "# Device contract",
        "",
        "Requirements of PyTorch and the libraries on top of it on a device, and their status",
        "on the device `tpu`. **P0**: common programs break without it. **P1**: expected.",
        "**P2**: nice to have. The rows marked *yes* are checked one by one by the tests of the",
        "package that has it; this page is generated from the same table.",
    ]
    for letter, title in contract.groups.items():
        out += ["", f"## {title}", "", "| # | Feature | Requirement | Priority | There |"]
        out.append("|---|---|---|---|---|")
        for r in contract.of_group(letter):
            text = r.requirement
            if r.names:
                text += " Names on `torch.tpu`: " + ", ".join(f"`{n}`" for n in r.names) + "."
            if r.note:
                text += f" *{r.note}*"
            if r.package != "tpu-core":
                text += f" *With the package {r.package}.*"
            row = (r.id, r.feature, text, r.priority, r.status)
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(out) + "\n"

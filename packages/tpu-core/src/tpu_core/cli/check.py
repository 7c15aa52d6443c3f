"""Result of a check of ``tpu doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "broken"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's answer.

    Attributes:
        section: Heading it stands under.
        name: Subject of the check.
        value: Result of the check.
        status: ``"broken"`` keeps the device from working, ``"warning"`` does not.
        remedy: Advice, where the status is not ``"ok"``.
    """

    section: str
    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""

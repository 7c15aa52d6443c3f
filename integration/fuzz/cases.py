"""What a fuzzer draws and finds, as plain data: cases, failures, findings, the corpus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

CORPUS = Path(__file__).parent / "corpus"

# Values of TPU_TIERS and TPU_TIER_PATIENCE. With no patience segments go over to programs when they
# come for the third time.
TIERS = {
    "compiled": ("compiled", 3.0),
    "host": ("host", 3.0),
    "auto": ("auto", 3.0),
    "restless": ("auto", 0.001),
}
# How often each is drawn: `restless` meets kernels, programs and the ways between them.
SHARES = {"compiled": 3, "restless": 4, "host": 2, "auto": 1}


def tiers_of_case(seed: object) -> str:
    """A name of `TIERS`, from the seed alone, so that cases are the same whatever the tiers."""
    return Random(f"{seed}/tiers").choices([*SHARES], [*SHARES.values()])[0]


@dataclass(frozen=True)
class Case:
    """One program of a fuzzer.

    Attributes:
        fuzzer: Name of the fuzzer that drew it.
        data: The program; JSON values only, so that it can be kept and replayed.
        tiers: A name of `TIERS` that it runs with; empty: the process's.
    """

    fuzzer: str
    data: dict[str, Any]
    tiers: str = ""


@dataclass(frozen=True)
class Failure:
    """A difference between the device and the CPU.

    Attributes:
        kind: "value", "dtype", "shape", "strides", "error" (only the device raises, or another
            type), "no error" (only the CPU raises), "crash", "timeout", "exception" (of the
            fuzzer).
        key: What it is about, an op's name for example: findings of equal kind and key count as
            one.
        text: Details for a person.
    """

    kind: str
    key: str
    text: str = ""

    def is_like(self, other: Failure) -> bool:
        return (self.kind, self.key) == (other.kind, other.key)


@dataclass(frozen=True)
class Settings:
    """How the process that runs cases is configured.

    Attributes:
        mode: TPU_EAGER_MODE.
        compile: TPU_COMPILE.
        cache: TPU_CACHE.
        planted: A fault of `fuzz.planted`.
        tiers: A name of `TIERS`.
    """

    mode: str = "fused"
    compile: str = "blocking"
    cache: str = "off"
    planted: str | None = None
    tiers: str = "compiled"

    def environment(self) -> dict[str, str]:
        tiers, patience = TIERS[self.tiers]
        return {
            "TPU_TIERS": tiers,
            "TPU_TIER_PATIENCE": str(patience),
            "TPU_EAGER_MODE": self.mode,
            "TPU_COMPILE": self.compile,
            "TPU_CACHE": self.cache,
            "TPU_FALLBACK": "allow",
        }

    def apply(self) -> None:
        """Set this process's environment; before the device starts.

        The parent may have read its own: drawing asks whether there is a device.

        Raises:
            RuntimeError: Other settings are in force.
        """
        os.environ.update(self.environment())
        from tpu_core.config import from_environment, reload

        if (found := reload()) != from_environment(os.environ):
            raise RuntimeError(f"{self} are not in force, but {found}")


@dataclass(frozen=True)
class Finding:
    """Cases that fail when they run in this order in one new process."""

    failure: Failure
    cases: tuple[Case, ...]
    settings: Settings = field(default_factory=Settings)
    found: str = ""
    source: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Finding:
        data = json.loads(text)
        return cls(
            Failure(**data["failure"]),
            tuple(Case(**case) for case in data["cases"]),
            Settings(**data["settings"]),
            data.get("found", ""),
            data.get("source", ""),
        )


def keep(finding: Finding, folder: Path = CORPUS) -> Path:
    """Write a finding into the corpus; returns its file."""
    f = finding.failure
    name = "".join(c if c.isalnum() else "_" for c in f"{f.key}-{f.kind}")[:80]
    folder = folder / finding.cases[-1].fuzzer
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(finding.to_json())
    return path


def corpus(fuzzer: str, folder: Path = CORPUS) -> Iterator[tuple[Path, Finding]]:
    """Findings that were kept of a fuzzer."""
    for path in sorted((folder / fuzzer).glob("*.json")):
        yield path, Finding.from_json(path.read_text())

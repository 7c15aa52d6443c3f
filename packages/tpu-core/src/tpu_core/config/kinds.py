"""Syntax of configuration values: parsers for the kinds of ``TPU_*`` variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SWITCH = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


@dataclass(frozen=True)
class Kind:
    """Syntax of a field in the environment.

    Attributes:
        name: Name of the type in the docs.
        parse: Text to value; raises `ValueError` for a value that is not valid.
        valid: Valid values, for the error message and the docs.
        installed: Further valid values, those of other packages, for the error message.
    """

    name: str
    parse: Callable[[str], Any]
    valid: str
    installed: Callable[[], Iterable[str]] = tuple


def choice(*names: str) -> Kind:
    """One of a few names, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(text)
        return text.lower()

    return Kind("choice", parse, ", ".join(names))


def choice_or_plugin(group: str, *names: str) -> Kind:
    """One of a few names, or that of an entry point of a group, which is looked for last."""

    def installed() -> set[str]:
        from importlib.metadata import entry_points  # what most processes need not read

        return set(entry_points(group=group).names) - set(names)

    def parse(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        if text not in installed():
            raise ValueError(text)
        return text

    return Kind("choice", parse, ", ".join(names), lambda: sorted(installed()))


def integer(least: int) -> Kind:
    """An integer not below ``least``."""

    def parse(text: str) -> int:
        if (value := int(text)) < least:
            raise ValueError(text)
        return value

    return Kind("integer", parse, f"an integer of at least {least}")


def _parse_positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError(text)
    return value


def _parse_verify(text: str) -> str:
    if not re.fullmatch(r"off|first|sample:0*[1-9]\d*", text.lower()):
        raise ValueError(text)
    return text.lower()


def _parse_url(text: str) -> str:
    if not re.match(r"[A-Za-z][\w+.-]*:", text):
        raise ValueError(text)
    return text


def parse_size(text: str) -> int:
    """Bytes from ``"4096"``, ``"500M"``, ``"1.5GiB"``; the units are binary (K = 1024).

    Raises:
        ValueError: The text is not a number with an optional unit K, M, G or T.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(text)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _parse_platform(text: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z][\w-]*", text):
        raise ValueError(text)
    return None if text.lower() == "auto" else text.lower()


def _parse_indices(text: str) -> tuple[int, ...]:
    indices = tuple(int(part) for part in text.split(",") if part.strip())
    if any(i < 0 for i in indices) or len(set(indices)) != len(indices):
        raise ValueError(text)
    return indices


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(",") if part.strip())
    if any(n < 1 for n in sizes) or any(a >= b for a, b in zip(sizes, sizes[1:])):
        raise ValueError(text)
    return sizes


PLATFORM = Kind("name", _parse_platform, "auto, tpu, cpu, or a PJRT plug-in's name such as cuda")
INDICES = Kind("list of integers", _parse_indices, "distinct device indices such as 0,1,3")
SIZES = Kind("list of integers", _parse_sizes, "increasing sizes such as 64,128,512")
BYTES = Kind("bytes", parse_size, "a number of bytes such as 4096, 500M or 10G")
FOLDER = Kind("folder", lambda text: Path(text).expanduser(), "a folder")
BOOL = Kind("bool", lambda text: _SWITCH[text.lower()], "1, 0, true, false, on, off, yes, no")
SECONDS = Kind("seconds", _parse_positive, "a number of seconds above 0")
VERIFY = Kind("choice", _parse_verify, "off, first, or sample:N with an integer N of at least 1")
RATIO = Kind("number", _parse_positive, "a number above 0")
URL = Kind("URL", _parse_url, "a URL such as s3://bucket/folder or file:///mnt/shared/folder")

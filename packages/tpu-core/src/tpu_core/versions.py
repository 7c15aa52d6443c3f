"""Release numbers of distributions and the pins that they satisfy."""

from __future__ import annotations

import re
from importlib import metadata


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, pins: str) -> bool:
    """Whether a release satisfies pins such as ``"<=0.10.2,>=0.10.1"`` or ``"==0.0.42.*"``.

    Knows ``== <= >= < > !=`` over dotted numbers; a pin of another kind counts as satisfied.
    """
    have = _numbers(version)
    for pin in pins.split(","):
        match = re.fullmatch(r"(==|<=|>=|!=|<|>)([\d.]+?)(\.\*)?", pin.strip())
        if not match:
            continue
        sign, text, star = match.groups()
        want = _numbers(text)
        length = len(want) if star else max(len(have), len(want))
        a, b = ((*n, *[0] * length)[:length] for n in (have, want))
        holds = {"==": a == b, "!=": a != b, "<=": a <= b, ">=": a >= b, "<": a < b, ">": a > b}
        if not holds[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0]))

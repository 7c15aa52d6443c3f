"""Releases of distributions, what asks for which, and whether the installed ones are such."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tpu_core.errors import VersionMismatchError


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, pins: str) -> bool:
    """Return whether a release satisfies pins such as ``"<=0.10.2,>=0.10.1"`` or
    ``"==0.0.42.*"``.
    """
    return SpecifierSet(pins).contains(version, prereleases=True)


def pins_of(by: str, name: str, extra: str = "") -> str | None:
    """The pins that an installed distribution has for another one, the last of them.

    Args:
        by: The distribution that asks.
        name: The distribution that it asks for.
        extra: An extra of ``by`` whose requirements count too; of others they do not.
    """
    try:
        texts = metadata.requires(by) or []
    except metadata.PackageNotFoundError:
        return None
    found = None
    for requirement in map(Requirement, texts):
        if requirement.name != name or not requirement.specifier:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found = str(requirement.specifier)
    return found


def require_jax() -> None:
    """Refuse a jax or jaxlib that tpu-core was not made for.

    Raises:
        VersionMismatchError: It is too old, too new, or not there.
    """
    ranges = {name: pins_of("tpu-core", name) for name in ("jax", "jaxlib")}
    remedy = "pip install " + " ".join(f'"{name}{pins or ""}"' for name, pins in ranges.items())
    for name, pins in ranges.items():
        version = installed(name)
        if version is None:
            raise VersionMismatchError(f"{name} is not installed.", remedy=f"Install it: {remedy}")
        if pins is not None and not satisfies(version, pins):
            raise VersionMismatchError(
                f"tpu_core works with {name} {pins}, but {name} {version} is installed.",
                remedy=f"Install one that fits: {remedy}",
            )

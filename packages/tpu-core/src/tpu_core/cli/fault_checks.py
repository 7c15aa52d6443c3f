"""The checks of ``tpu doctor`` that run the canaries of known faults."""

from __future__ import annotations

from collections.abc import Iterator

from tpu_core import platforms
from tpu_core.cli.check import Check
from tpu_core.errors import ConfigurationError, TpuNotAvailableError
from tpu_core.pjrt import canaries, known_faults

_REMEDY = (
    "Unset XLA_FLAGS if it names an option of the page on known faults; else install the jaxlib "
    "that jax asks for."
)


def check_known_faults() -> Iterator[Check]:
    """Faults of the platform: whether they are avoided, by their canaries."""
    section = "Known faults"
    try:
        platform = platforms.Platform.resolve().name
    except (TpuNotAvailableError, ConfigurationError):
        return  # reported by check_platform
    faults = {f.name: f for f in known_faults.applying(platform) if f.has_canary}
    for name, wrong in canaries.run(faults):
        fault = faults[name]
        if fault.avoided_by is None:
            value = "gone: take it off the table" if wrong is None else f"there: {fault.what}"
            yield Check(section, name, value)
        elif wrong is None:
            yield Check(section, name, "avoided")
        else:
            yield Check(section, name, f"{fault.what} ({wrong})", "broken", _REMEDY)

"""The docs page of the configuration, made from the fields of `Config`."""

from __future__ import annotations

from tpu_core.config import settings


def config_page() -> str:
    """Markdown of ``docs/reference/configuration.md``, generated from the fields of `Config`."""
    out = [
        "# Configuration",
        "",
        "Settings are environment variables, read and checked at first use of the device. In a",
        'program, `tpu_core.config.override(fallback="error")` changes them for a block, under the',
        "names in the last column. This page is generated from `tpu_core.config`.",
        "",
        "| Variable | Values | Default | Meaning | Field |",
        "|---|---|---|---|---|",
    ]
    for spec in settings():
        row = (f"`{spec.env}`", spec.kind.valid, spec.shown, spec.doc, f"`{spec.name}`")
        out.append("| " + " | ".join(row) + " |")
    at_start = ", ".join(f"`{spec.env}`" for spec in settings() if spec.at_start)
    out += [
        "",
        "The device reads these when it starts; from then on `override` refuses to change them:",
        f"{at_start}.",
        "",
        "Sizes are in binary units: `1K` is 1,024 bytes. An empty variable counts as unset. A",
        "value that is not valid raises `ConfigurationError`, which lists what is. Variables that",
        "libtpu itself reads (`TPU_LIBRARY_PATH`, `TPU_VISIBLE_CHIPS`, ...) keep their meaning.",
    ]
    return "\n".join(out) + "\n"

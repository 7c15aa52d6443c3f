"""The docs page of the errors, made from their classes."""

from __future__ import annotations

import inspect

from tpu_core import errors
from tpu_core.errors.base import Documented


def error_classes() -> list[type[Documented]]:
    """Every documented error and warning class, by code, errors before warnings of one code."""
    found = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Documented) and value.code != "TPU1000"
    ]
    return [errors.TpuError, *sorted(found, key=lambda c: (c.code, issubclass(c, Warning)))]


def errors_page() -> str:
    """Markdown of ``docs/reference/errors.md``, generated from the classes' docstrings."""
    classes = error_classes()
    out = [
        "# Errors",
        "",
        "Every error of this project has a stable code, which is printed in its message together",
        "with a link to this page. This page is generated from `tpu_core.errors`.",
        "",
        "| Code | Class | Meaning |",
        "|---|---|---|",
    ]
    sections = []
    anchored: set[str] = set()
    for cls in classes:
        summary, _, body = inspect.cleandoc(cls.__doc__ or "").partition("\n")
        out.append(f"| [{cls.code}](#{cls.docs_anchor}) | `{cls.__name__}` | {summary} |")
        # Two classes may share a code (an error and its warning); an anchor must stay unique.
        anchor = [] if cls.docs_anchor in anchored else [f'<a id="{cls.docs_anchor}"></a>', ""]
        anchored.add(cls.docs_anchor)
        text = body.split("\nArgs:\n")[0].split("\nExample:\n")[0].strip()
        bases = [b for b in cls.__bases__ if not issubclass(b, Documented)]
        sections += ["", *anchor, f"## {cls.code}: {cls.__name__}", "", summary]
        sections += ["", f"It is also a `{bases[0].__name__}`."] if bases else []
        sections += ["", text] if text else []
    return "\n".join([*out, *sections]).rstrip() + "\n"

"""Base of the errors and warnings of `tpu_core.errors`: code, message format, base classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from tpu_core._version import DOCS_URL

DOCS_PAGE = "docs/reference/errors.md"


class Documented(Exception):
    """Code, docs anchor and message format shared by the errors and the warnings.

    Attributes:
        code: Stable code such as ``"TPU1001"``; never reused for another meaning.
        docs_anchor: Anchor of the class on the errors page.
        remedy: Advice, where the place that raises has nothing more specific to say.
        line: The user's line, or None.
        values: Names and values that were involved.
    """

    code: ClassVar[str] = "TPU1000"
    docs_anchor: ClassVar[str] = "tpu1000"
    remedy: ClassVar[str] = ""

    def __init__(
        self,
        what: str = "",
        *,
        values: Mapping[str, object] | None = None,
        line: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(self.compose(what, values, line, remedy))
        self.line = line
        self.values: dict[str, object] = dict(values or {})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.docs_anchor = cls.code.lower()

    @classmethod
    def docs_link(cls) -> str:
        """Section on the page of errors: its URL, or ``docs/reference/errors.md#tpu1001``."""
        # Not of `config`, whose own errors have a link as well.
        base = os.environ.get("TPU_DOCS_URL", "").strip() or DOCS_URL
        page = f"{base.rstrip('/')}/reference/errors/" if base else DOCS_PAGE
        return f"{page}#{cls.docs_anchor}"

    @classmethod
    def compose(
        cls,
        what: str,
        values: Mapping[str, object] | None = None,
        line: str | None = None,
        remedy: str | None = None,
    ) -> str:
        """The full message; ``what`` is returned as it is when it is a full message already.

        Pickling and ``torch.utils.data`` rebuild an exception from its message alone, so that a
        composed message must survive being composed again.
        """
        # Another process may have another base.
        if f"#{cls.docs_anchor}" in what:
            return what
        parts = [f"[{cls.code}] {what}"]
        parts += [f"  {name}: {value}" for name, value in (values or {}).items()]
        if line:
            parts.append(f"  at {line}")
        advice = remedy or cls.remedy
        if advice:
            parts.append(f"What to do: {advice}")
        parts.append(f"See {cls.docs_link()}")
        return "\n".join(parts)


class TpuError(Documented, RuntimeError):
    """Base of every error that this project raises itself.

    **How it happens.** It is not raised directly. Catch it to handle all of the errors below;
    errors that PyTorch defines (a shape mismatch, a wrong dtype, tensors on different devices)
    keep PyTorch's own classes and messages and are not `TpuError`s.

    ```python
    import tpu_core

    try:
        train()
    except tpu_core.errors.TpuError as error:
        print(error.code, error.line)
    ```

    **How to fix it.** Read the section of the class that was raised.

    Args:
        what: One sentence that says what happened.
        values: Names and values that were involved, one line each.
        line: The user's line, ``"train.py:31"``.
        remedy: Advice; the class's own unless given.

    Example:
        >>> raise ExecutionError("A program failed.", values={"op": "aten.add.Tensor"})
    """


class TpuWarning(Documented, UserWarning):
    """Base of the warnings; takes the same arguments as `TpuError`."""


def format_bytes(n: float) -> str:
    """``n`` bytes for people, in binary units: ``"1.50 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"

"""From the status text of XLA and JAX to our typed errors.

jaxlib raises one exception class for everything, with an absl status name at the start of its
text, so the text is all there is to go by. The patterns were taken from jaxlib 0.10.2 (CPU) and
from libtpu's messages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tpu_core.errors import TpuError

_DONATED = re.compile(r"deleted or donated|Array has been deleted")
_UNAVAILABLE = re.compile(
    r"failed to initialize|Unknown backend|Unable to initialize backend|TPU initialization failed"
)
# While the processes of a group ran a program together.
_LOST = re.compile(r"Gloo [\w-]+ failed|Connection (closed|reset) by peer")
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory in memory space")
# INVALID_ARGUMENT is what a run with wrong buffers raises too; these texts tell the two apart.
_RUN = re.compile(
    r"Execution supplied|Invalid buffer passed to Execute|RuntimeProgramInputMismatch|"
    r"execute_sharded"
)
_COMPILE = re.compile(
    r"\b(INVALID_ARGUMENT|UNIMPLEMENTED|INTERNAL)\b|Failed to parse|No registered implementation"
)
_SIZE = r"([\d.]+)\s*([KMGT]?)(?:i?B|\s*bytes|(?=[^\w]|$))"
_NEEDED = re.compile(rf"(?:allocating|allocate|Used) {_SIZE}")
_LIMIT = re.compile(rf"Used [\d.]+[KMGT]? of {_SIZE}")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return round(float(match[1].rstrip(".")) * _UNITS[match[2]]) if match else None


def map_xla_error(
    exc: BaseException,
    *,
    op: str | None = None,
    line: str | None = None,
    shapes: object = None,
    stage: Literal["compile", "run"] | None = None,
    limit: int | None = None,
    live: int | None = None,
) -> TpuError:
    """The typed error for an exception of JAX or jaxlib; raise it ``from exc``.

    Args:
        exc: The exception of jaxlib. A `TpuError` comes back as it is.
        op: Op or ops that were being compiled or run.
        line: The user's line, ``"train.py:31"``.
        shapes: Shapes and dtypes of the operands, shown as they print.
        stage: The stage, where the caller knows it; else it is inferred from the text.
        limit: Bytes of memory the device has, for an out-of-memory error.
        live: Bytes held by live tensors, for an out-of-memory error.

    Returns:
        `OutOfMemoryError`, `DonatedBufferError`, `PeerLostError`, `TpuNotAvailableError`,
        `CompilationError` or `ExecutionError`.

    Example:
        >>> try:
        ...     loaded.execute_sharded(buffers)
        ... except Exception as exc:
        ...     raise map_xla_error(exc, op="aten.add.Tensor", line="train.py:31") from exc
    """
    from tpu_core import errors

    if isinstance(exc, errors.TpuError):
        return exc
    text = str(exc).strip() or type(exc).__name__
    values = {"op": op, "shapes": shapes}
    known = {name: value for name, value in values.items() if value is not None}

    if _DONATED.search(text):
        what = "A value was read whose memory had been donated to another program."
        return errors.DonatedBufferError(what, values={**known, "XLA": text}, line=line)
    if _LOST.search(text):
        what = "A process was lost while others ran a collective with it."
        return errors.PeerLostError(what, values={**known, "XLA": text}, line=line)
    if _MEMORY.search(text):
        return errors.OutOfMemoryError(
            needed=_bytes(_NEEDED, text),
            limit=_bytes(_LIMIT, text) or limit,
            live=live,
            values={**known, "XLA": text},
            line=line,
        )
    if _UNAVAILABLE.search(text):
        return errors.TpuNotAvailableError(text, values=known, line=line)
    if stage is None:
        stage = "compile" if _COMPILE.search(text) and not _RUN.search(text) else "run"
    if stage == "compile":
        what = f"XLA could not compile a program: {text}"
        return errors.CompilationError(what, values=known, line=line)
    return errors.ExecutionError(f"A program failed on the device: {text}", values=known, line=line)

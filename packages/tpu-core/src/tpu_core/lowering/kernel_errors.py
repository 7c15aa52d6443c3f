"""Errors of JAX, Mosaic and libtpu for a Pallas kernel that a TPU does not take."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tpu_core.errors import KernelCompilationError, TpuError

_PALLAS = f"{os.sep}_src{os.sep}pallas{os.sep}"
_REPORT = re.compile(r"(Please (file|report) an? (issue|bug)|See details) at\S*:? ?\S+")
_PLACE = re.compile(r'loc\(.*?"([^"]+)":(\d+):\d+')
_TOO_MUCH = re.compile(r"Scoped allocation with size (\S+) and limit (\S+) exceeded")
_TILES = (
    "Make the last two sizes of the block multiples of 8 and 128, or those of the whole array; "
    "pad the array where it has fewer."
)
_SMALLER = "Make the blocks smaller: each is in memory twice, while the next one is fetched."


@contextmanager
def raising_kernel_errors() -> Iterator[None]:
    """Raise what Pallas raises while kernels are lowered as a `KernelCompilationError`.

    Example:
        >>> with raising_kernel_errors():
        ...     lowered = jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
    """
    try:
        yield
    except TpuError:
        raise
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        if not any(_PALLAS in frame.f_code.co_filename for frame, _ in frames):
            raise
        text = _REPORT.sub("", str(error)).strip()
        raise KernelCompilationError(
            f"Pallas does not lower a kernel for TPUs: {text}",
            remedy=_TILES if "block shape" in text else None,
        ) from error


# The libtpu of jax 0.11 names the kernel's module and HLO op there.
_REFUSED = re.compile(r"Mosaic failed to compile TPU kernel(?: with [^\n]*?`)?: ")


def kernel_error_of(message: str) -> KernelCompilationError | None:
    """The error for libtpu's message; None where no kernel is to blame.

    Example:
        >>> if (error := kernel_error_of(str(xla_error))) is not None:
        ...     raise error
    """
    too_much = _TOO_MUCH.search(message)
    if too_much and "tpu_custom_call" in message:
        return KernelCompilationError(
            "A kernel needs more of the chip's vector memory (VMEM) than it may have.",
            values={"it needs": too_much[1], "limit": too_much[2], **_name(message)},
            remedy=_SMALLER,
        )
    found = _REFUSED.search(message)
    if not found:
        return None
    text = message[found.end() :]
    place = _PLACE.search(text)
    return KernelCompilationError(
        f"Mosaic does not compile a kernel: {text.split(chr(10), maxsplit=1)[0].strip()}",
        values=_name(message),
        line=f"{place[1]}:{place[2]}" if place else None,
    )


def _name(message: str) -> dict[str, object]:
    found = re.search(r'op_name="([^"]+)"', message)
    return {"in": found[1]} if found else {}

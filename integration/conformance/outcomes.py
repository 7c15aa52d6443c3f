"""Outcomes of a call on the CPU and on the device: a result or an error; samples and cotangents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.compare import Different


class Raised:
    """An error in place of a result."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error)[:300]}"

    def says_as(self, other: Raised) -> bool:
        """Whether the first line is the other's, but for the device's name."""
        first = str(self.error).replace("tpu", "cpu").split("\n")[0]
        return first == str(other.error).split("\n")[0]


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    """The result of ``run``, or `Raised`."""
    try:
        return run(*args)
    except Exception as error:
        return Raised(error)


@contextmanager
def named(case: str) -> Iterator[None]:
    """Have a difference or an error in the block say in which case it came."""
    try:
        yield
    except Different as error:
        raise Different(f"{case}: {error}") from None
    except Exception as error:
        error.add_note(case)
        raise


def both_returned(got: Any, want: Any) -> bool:
    """Whether both sides have results; False where both raised errors of one type.

    Raises:
        Different: The CPU raised, and the device did not, or raised an error of another type.
        Exception: The device's error, where the CPU has a result.
    """
    if isinstance(want, Raised):
        if not isinstance(got, Raised):
            raise Different(f"no error; the CPU: {want}")
        if not isinstance(got.error, type(want.error)):
            raise Different(f"{got}; the CPU: {want}")
        return False
    if isinstance(got, Raised):
        raise got.error
    return True


def same_error(which: object, got: Any, want: Raised, pattern: str | None = None) -> None:
    """Compare an error with the CPU's: its type, and its first line.

    Args:
        which: The case, for the message.
        got: The outcome on the device.
        want: The outcome on the CPU.
        pattern: A regular expression that serves in place of the CPU's line.

    Raises:
        Different: No error, one of another type, or one with another text.
    """
    if not isinstance(got, Raised):
        raise Different(f"error {which}: none; the CPU: {want}")
    matches = pattern is not None and re.search(pattern, str(got.error))
    if type(got.error) is not type(want.error) or not (matches or got.says_as(want)):
        raise Different(f"error {which}: {got}; the CPU: {want}")


def spread(samples: Iterator[Any], limit: int) -> list[Any]:
    """At most ``limit`` samples, from the first to the last; all of them for 0."""
    found = list(samples)
    if limit == 0 or len(found) <= limit:
        return found
    if limit == 1:
        return found[:1]
    return [found[i * (len(found) - 1) // (limit - 1)] for i in range(limit)]


def cotangents(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fixed multiples of 1/64 between -1 and 1, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for o in outputs:
        drawn = torch.randint(-64, 65, o.shape, generator=generator) / 64
        found.append(drawn.to(o.dtype).to(o.device))
    return found

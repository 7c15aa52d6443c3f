"""Stub for the device where it cannot be registered: ``import torch`` still works."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any, NoReturn

import torch

from tpu_core.errors import (
    DeviceSlotTakenError,
    DeviceSlotTakenWarning,
    TpuError,
    VersionMismatchError,
)


def stand_down(why: str) -> None:
    """Warn that another backend has the PrivateUse1 slot; everything else is left alone.

    Args:
        why: The owner of the slot, as a clause.
    """
    what = f"tpu_core is not active: {why}."
    # The extension registers kernels as soon as it is loaded, into what is now another's device.
    sys.modules["tpu_core._C"] = _Refusal("tpu_core._C", DeviceSlotTakenError, what)
    warnings.warn(DeviceSlotTakenWarning(what), stacklevel=2)


class _Refusal(types.ModuleType):
    """A module that raises whenever something of it is used.

    Args:
        name: The module's name.
        error: Class of the exception; it is an `AttributeError` as well, so that `hasattr` says no.
        what: Text of the exception.
        remedy: Advice; the class's own unless given.
    """

    def __init__(
        self, name: str, error: type[TpuError], what: str, remedy: str | None = None
    ) -> None:
        super().__init__(name)
        kind = type(error.__name__, (error, AttributeError), {"__module__": error.__module__})
        self.__dict__["_error"] = lambda: kind(what, remedy=remedy)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.__dict__["_error"]()


class _AbsentModule(_Refusal):
    """``torch.tpu`` where the extension does not fit: probes say no, use raises what to install."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return False

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Seeds nothing: there is no device."""


def register_absent_module(problem: str, remedy: str) -> None:
    """Register a ``torch.tpu`` that explains ``problem`` on first use."""
    error = VersionMismatchError
    module = _AbsentModule("torch.tpu", error, problem, remedy)
    sys.modules["tpu_core._C"] = _Refusal("tpu_core._C", error, problem, remedy)
    torch._register_device_module("tpu", module)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise error(problem, remedy=remedy)

    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty.memory_format", refuse)
    library.impl("empty_strided", refuse)
    module.__dict__["_held"] = library, _register_guard()


def _register_guard() -> Any:
    """Without a device guard ``x.to("tpu")`` fails before it reaches `refuse`."""
    acc: Any = getattr(torch._C, "_acc", None)
    if not hasattr(acc, "register_python_privateuseone_device_guard"):
        return None  # another torch, without this interface

    class Guard(acc.DeviceGuard):  # type: ignore[name-defined] # looked up at run time
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    guard = Guard()
    acc.register_python_privateuseone_device_guard(guard)
    return guard

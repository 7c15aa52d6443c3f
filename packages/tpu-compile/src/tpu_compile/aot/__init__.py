"""Ahead-of-time compilation for a TPU topology: ``tpu_compile.aot(model, ...)``.

The package is also a function, `tpu_compile.aot.api.aot`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tpu_compile.aot.api import aot as compile_ahead
from tpu_compile.aot.api import sweep as sweep
from tpu_compile.aot.plan import Plan as Plan
from tpu_compile.aot.saved import load as load
from tpu_compile.aot.sharding import fsdp as fsdp

__all__ = ["Plan", "fsdp", "load", "sweep"]


class _Callable(ModuleType):
    """A module that is called as its function."""

    def __call__(self, *args: Any, **options: Any) -> Plan:
        return compile_ahead(*args, **options)


sys.modules[__name__].__class__ = _Callable
_Callable.__call__.__doc__ = compile_ahead.__doc__

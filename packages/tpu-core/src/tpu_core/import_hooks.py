"""Imports: functions that wait for a module, which would cost too much in `import torch`, and forks
that wait for threads that import.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


def when_imported(functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call a function with each of some modules: now, or once it has been imported.

    Args:
        functions: By the names of the modules.
    """
    missing = {}
    for name, function in functions.items():
        if name in sys.modules:
            function(sys.modules[name])
        else:
            missing[name] = function
    if missing:
        sys.meta_path.insert(0, _Finder(missing))


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function on each of some modules once it has been executed."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls the function."""
        function = self._functions.pop(name, None)
        if not self._functions and self in sys.meta_path:
            sys.meta_path.remove(self)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, function)
        return spec


def _call_after(loader: importlib.abc.Loader, function: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        function(module)

    # On this loader, which is of one module; its class serves all the others.
    vars(loader)["exec_module"] = exec_module


# What a forked child may ask of the device, to seed its generators for example, imports these.
_WAITED_FOR = frozenset(
    {"tpu_core", "tpu_eager", "tpu_compile", "tpu_distributed", "jax", "jaxlib"}
)


def finish_before_forks() -> None:
    """Let no fork come in the middle of another thread's import of what the device needs.

    The lock of a module whose importing thread is not in the child is never released there: a
    worker of a DataLoader that is started while another thread starts the device would wait for
    ever.
    """
    os.register_at_fork(before=_finish)


def _finish() -> None:
    if "tpu_core.runtime" not in sys.modules:
        return  # no thread has begun to use the device
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _WAITED_FOR:
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            with contextlib.suppress(ImportError):  # it is raised in the other thread
                importlib.import_module(name)
    # What the count of devices reads and imports once is there then: the child asks for it.
    # Variables that the child sets are its own, though.
    from tpu_core.config import left_unread

    with contextlib.suppress(Exception), left_unread():  # the child is told
        importlib.import_module("tpu_core.runtime").device_count()

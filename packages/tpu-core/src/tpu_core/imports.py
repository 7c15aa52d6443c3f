"""Functions that wait for a module to be imported: what would cost too much in `import torch`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


def when_imported(functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call a function with each of some modules: now, or once it has been imported.

    Args:
        functions: By the names of the modules.

    Example:
        >>> when_imported({"torch.distributed.tensor": lambda module: print(module.__name__)})
        >>> import torch.distributed.tensor
        torch.distributed.tensor
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

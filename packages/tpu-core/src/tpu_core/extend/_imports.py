"""Imports of PyTorch that a package waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

from tpu_core import _autoload, import_hooks


def when_imported(functions: Mapping[str, Callable[[ModuleType], None]]) -> bool:
    """Call a function with each of some modules: now, or once it has been imported.

    Where the device could not be registered none is called: PyTorch stays as it is.

    Args:
        functions: By the names of the modules.

    Returns:
        Whether the device is registered.

    Example:
        >>> when_imported({"torch.distributed.tensor": lambda module: print(module.__name__)})
        True
        >>> import torch.distributed.tensor
        torch.distributed.tensor
    """
    _autoload.load()
    if not _autoload.is_registered():
        return False
    import_hooks.when_imported(functions)
    return True

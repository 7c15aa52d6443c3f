"""Lowerings of ATen ops to JAX, by family; see `tpu_core.lowering.registry` for the convention."""

from __future__ import annotations

import importlib
import pkgutil
import threading

_lock = threading.Lock()
_loaded = False


def load() -> None:
    """Import every module of this folder, so that the registry holds every lowering.

    Imports jax. May be called any number of times and from any thread; once a load has succeeded
    it costs nothing.

    Raises:
        ValueError: Two lowerings are registered for one overload.

    Example:
        >>> load_lowerings()
        >>> find_lowering("aten.mm.default").op
        'aten.mm.default'
    """
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
            importlib.import_module(f"{__name__}.{name}")
        _loaded = True

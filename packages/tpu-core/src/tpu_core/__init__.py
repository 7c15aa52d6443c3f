"""Device ``tpu`` for PyTorch: storages, recorder, lowerings, programs and their cache.

Importing this package starts nothing and imports neither jax nor libtpu. Where PyTorch's autoload
is off, it registers the device.
"""

from __future__ import annotations

from typing import Any

# First: `import torch` loads this package again by entry point and must find its modules not begun.
import torch as _torch

from tpu_core._version import __version__ as __version__

__all__ = ["__version__", "errors", "from_jax", "to_jax"]


def __getattr__(name: str) -> Any:
    if name in ("to_jax", "from_jax"):
        from tpu_core import interop

        return getattr(interop, name)
    if name == "errors":
        import tpu_core.errors

        return tpu_core.errors
    raise AttributeError(f"module 'tpu_core' has no attribute '{name}'")


if not _torch._is_device_backend_autoload_enabled():
    from tpu_core import _autoload

    _autoload.load()

"""torch.compile for device ``tpu``, plugged into torch by entry points, and `aot`."""

from __future__ import annotations

from typing import Any

from tpu_compile._version import __version__ as __version__
from tpu_compile.layer_scan import scan_layers as scan_layers

__all__ = ["__version__", "aot", "scan_layers"]


def __getattr__(name: str) -> Any:
    if name == "aot":  # imports jax
        import importlib

        return importlib.import_module("tpu_compile.aot")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

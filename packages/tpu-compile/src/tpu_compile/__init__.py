"""torch.compile for device ``tpu``, plugged into torch by entry points, `aot` and `scan_layers`."""

from __future__ import annotations

import importlib
from typing import Any

from tpu_compile._version import __version__ as __version__

__all__ = ["__version__", "aot", "scan_layers"]


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: `tpu_compile.export` is read where there is no PyTorch.
    if name == "aot":
        return importlib.import_module("tpu_compile.aot")
    if name == "scan_layers":
        found = importlib.import_module("tpu_compile.layer_scan").scan_layers
        globals()[name] = found
        return found
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

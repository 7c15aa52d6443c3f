"""torch.compile for device ``tpu``, plugged into torch by entry points."""

from __future__ import annotations

from tpu_compile._version import __version__ as __version__
from tpu_compile.layer_scan import scan_layers as scan_layers

__all__ = ["__version__", "scan_layers"]

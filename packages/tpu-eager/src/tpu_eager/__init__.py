"""Debug and Fused eager modes for device ``tpu``, plugged into tpu_core by entry point."""

from __future__ import annotations

from tpu_eager._version import __version__ as __version__

__all__ = ["__version__"]

"""torch.compile for device ``tpu``, plugged into torch by entry points."""

from __future__ import annotations

from tpu_compile._version import __version__ as __version__

__all__ = ["__version__"]

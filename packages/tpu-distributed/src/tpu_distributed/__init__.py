"""Collectives for device ``tpu``, plugged into ``torch.distributed`` by an entry point."""

from __future__ import annotations

from tpu_distributed._version import __version__ as __version__

__all__ = ["__version__"]

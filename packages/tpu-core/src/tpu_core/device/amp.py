"""Automatic mixed precision."""

from __future__ import annotations

import torch


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes of ``torch.autocast("tpu")``, the default first."""
    return [torch.bfloat16, torch.float16]

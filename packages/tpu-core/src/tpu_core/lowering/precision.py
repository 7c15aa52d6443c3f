"""Precision of float32 matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from jax import lax

_BY_NAME = {
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "medium": lax.Precision.DEFAULT,
}
_override: ContextVar[str | None] = ContextVar("tpu_matmul_precision", default=None)


def precision_name() -> str:
    """The setting in force: ``"highest"``, ``"high"`` or ``"medium"``.

    A trace bakes the setting in, so it belongs to the key of anything compiled from one.

    Example:
        >>> matmul_precision()
        'highest'
    """
    return _override.get() or torch.get_float32_matmul_precision()


def matmul_precision() -> lax.Precision:
    """The XLA precision of float32 products.

    A TPU multiplies bfloat16: ``medium`` is one pass, ``high`` three, ``highest`` six, which is as
    exact as float32. The default is PyTorch's own, ``highest``.
    """
    return _BY_NAME[precision_name()]


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Override ``torch.set_float32_matmul_precision`` in this thread for the block's duration.

    Args:
        name: ``"highest"``, ``"high"`` or ``"medium"``.

    Raises:
        ValueError: Another name.
    """
    if name not in _BY_NAME:
        raise ValueError(f"precision must be one of {sorted(_BY_NAME)}, not '{name}'.")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def precision_of(dtype: Any) -> lax.Precision:
    """The precision of a product of operands of ``dtype``; the setting concerns 32 bits a part."""
    dtype = np.dtype(dtype)
    if dtype in (np.float32, np.complex64):
        return matmul_precision()
    if dtype in (np.float64, np.complex128):
        return lax.Precision.HIGHEST
    return lax.Precision.DEFAULT

"""Assertions inside programs: ops without a result, of which the check alone is left.

Device mode has none of them, they read on the host there; graphs and decompositions do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_core.lowering.checks import Finding, check, fixed
from tpu_core.lowering.registry import lowering


@lowering(
    "aten._assert_async.default",
    "aten._assert_async.msg",
    "aten._assert_tensor_metadata.default",
    "aten._linalg_check_errors.default",
)
def nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


@check("aten._assert_async.default", "aten._assert_async.msg")
def assert_async(condition: jax.Array, message: str | None = None) -> Iterator[Finding]:
    text = "Expected Tensor with single nonzero value, but got zero" if message is None else message
    yield Finding(~jnp.reshape(condition, ()).astype(np.bool_), 0, fixed(RuntimeError, text))


@check("aten._linalg_check_errors.default")
def linalg_check_errors(info: jax.Array, api_name: str, *, is_matrix: bool) -> Iterator[Finding]:
    """LAPACK's ``info`` of a matrix, or of each in a batch; PyTorch makes the error of it."""
    if info.size == 0:
        return
    flat = info.reshape(-1).astype(np.int64)
    first = jnp.argmax(flat != 0)
    value = (first.astype(np.int64) << 32) + (flat[first] & 0xFFFFFFFF)

    def error(value: int) -> Exception:
        batch, code = value >> 32, np.int64(value & 0xFFFFFFFF).astype(np.int32)
        infos = torch.zeros(() if is_matrix else batch + 1, dtype=torch.int32, device="cpu")
        infos[... if is_matrix else batch] = int(code)
        try:
            torch._linalg_check_errors(infos, api_name, is_matrix=is_matrix)
        except RuntimeError as found:
            return found
        raise AssertionError(f"{api_name}: {value} is no error")

    yield Finding(flat[first] != 0, value, error)

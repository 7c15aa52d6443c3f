"""Torch dtypes, JAX dtypes, and PyTorch's type promotion over JAX values."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from tpu_core.errors import UnsupportedOpError
from tpu_core.torch_compat import FLOAT8_SATURATES, HALF_COMPLEX

_PAIRS: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
TO_NUMPY: dict[torch.dtype, np.dtype[Any]] = {t: np.dtype(n) for t, n in _PAIRS.items()}
TO_TORCH: dict[np.dtype[Any], torch.dtype] = {n: t for t, n in TO_NUMPY.items()}


# Order of c10::ScalarType (c10/core/ScalarType.h); gaps are quantized and sub-byte types.
_CODES: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    8: torch.complex32,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}


def dtype_of_code(code: int) -> torch.dtype:
    """The torch dtype of a ``c10::ScalarType`` code."""
    try:
        return _CODES[code]
    except KeyError:
        raise TypeError(f"Tensors of c10::ScalarType {code} are not supported on 'tpu'.") from None


def code_of_dtype(dtype: torch.dtype) -> int:
    """The ``c10::ScalarType`` code of a torch dtype."""
    return _CODE_OF[dtype]


@functools.cache
def dtype_text(dtype: Any) -> str:
    """``str(dtype)``, which numpy works out anew each time, in 25 us."""
    return str(dtype)


def to_numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy/JAX dtype of a torch dtype.

    Raises:
        UnsupportedOpError: The dtype has no counterpart in XLA (quantized types, ``complex32``).

    Example:
        >>> to_numpy_dtype(torch.bfloat16)
        dtype(bfloat16)
    """
    try:
        return TO_NUMPY[dtype]
    except KeyError:
        # no TypeError: Python's operators take one of PyTorch's for operands that do not fit
        raise UnsupportedOpError(
            f"{dtype} is not supported on device 'tpu': XLA has no such type.",
            remedy="Convert the operands around this call, complex32 to complex64 for example.",
        ) from None


def is_number(x: Any) -> bool:
    """Return whether an operand is a number (Python, or a 0-d weakly typed array) and not a
    tensor.
    """
    return isinstance(x, (bool, int, float, complex)) or bool(getattr(x, "weak_type", False))


_default: ContextVar[torch.dtype | None] = ContextVar("tpu_default_dtype", default=None)


def default_dtype() -> torch.dtype:
    """PyTorch's default dtype: when the op being lowered was recorded, or now."""
    return _default.get() or torch.get_default_dtype()


@contextmanager
def default_dtype_of(dtype: torch.dtype) -> Iterator[None]:
    """Lower with the default dtype of the time when an op was recorded."""
    token = _default.set(dtype)
    try:
        yield
    finally:
        _default.reset(token)


def torch_dtype(x: Any) -> torch.dtype:
    """The torch dtype of a JAX value."""
    return TO_TORCH[np.dtype(x.dtype)]


def result_type(*operands: Any) -> np.dtype[Any]:
    """PyTorch's promoted dtype of JAX values and numbers (``torch.result_type`` over them).

    Dimensioned tensors win over 0-d tensors, which win over numbers, unless of a higher category
    (``combine_categories`` in aten/src/ATen/native/TypeProperties.cpp).
    """
    state: list[torch.dtype | None] = [None, None, None]  # dimensioned, 0-d, numbers
    for x in operands:
        if x is None:
            continue
        if is_number(x):
            dtype, level = _number_dtype(x), 2
        else:
            dtype, level = torch_dtype(x), 0 if x.ndim else 1
        held = state[level]
        state[level] = dtype if held is None else torch.promote_types(held, dtype)
    result = _combine(state[0], _combine(state[1], state[2]))
    if result is None:
        raise TypeError("result_type needs at least one operand.")
    # XLA has no complex32; the recorder refuses it as a result, so it only ever is a computing
    # dtype here (half_tensor == 1j), where the wider one is as good.
    return to_numpy_dtype(torch.complex64 if result in HALF_COMPLEX else result)


def _number_dtype(x: Any) -> torch.dtype:
    """The dtype that PyTorch gives a wrapped number."""
    kind = np.dtype(getattr(x, "dtype", type(x))).kind
    if kind in "biu":
        return torch.bool if kind == "b" else torch.int64
    default = default_dtype()
    return default.to_complex() if kind == "c" else default


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype``, or PyTorch's default float where it is integral or bool."""
    dtype = np.dtype(dtype)
    return to_numpy_dtype(default_dtype()) if dtype.kind in "biu" else dtype


def cast(x: Any, dtype: Any) -> jax.Array:
    """``x`` (array, number or size) as an array of ``dtype``, no longer weakly typed.

    Example:
        >>> cast(2.5, np.int32)
        Array(2, dtype=int32)
    """
    dtype = np.dtype(dtype)
    if isinstance(x, (bool, int, float, complex)):
        # A constant of the final dtype, so that no float64 literal enters the program.
        value = np.asarray(x)
        if dtype == np.bool_:
            return jnp.asarray(value != 0)
        value = value.real if value.dtype.kind == "c" and dtype.kind != "c" else value
        if _is_narrow_float(dtype):
            with np.errstate(over="ignore"):
                value = _saturated(value.astype(np.float32), dtype, np.clip)
        return jnp.asarray(value.astype(dtype))
    if not hasattr(x, "dtype"):  # a symbolic size
        x = jnp.asarray(x)
    source = np.dtype(x.dtype)
    if dtype == np.bool_ and source != np.bool_:
        return jnp.not_equal(x, jnp.zeros((), source))
    if source.kind == "c" and dtype.kind != "c":
        x = jnp.real(x)
    if dtype == np.uint8 and is_float(x.dtype):
        # XLA saturates, PyTorch goes through a signed integer: -1.0 is 255 (c10/util/TypeCast.h).
        x = jax.lax.convert_element_type(x, np.int32)
    if _is_narrow_float(dtype) and dtype != source:
        if not (is_float(source) and source.itemsize <= 4):
            x = jax.lax.convert_element_type(x, np.float32)
        x = _saturated(x, dtype, jnp.clip)
    return jax.lax.convert_element_type(x, dtype)


def _is_narrow_float(dtype: np.dtype[Any]) -> bool:
    """Return whether PyTorch converts to a dtype by way of float32, so that it rounds twice."""
    return is_float(dtype) and dtype.itemsize < 4


def _saturated(x: Any, dtype: np.dtype[Any], clip: Any) -> Any:
    """``x`` within the range of the one dtype that has no infinity and in which PyTorch saturates.

    XLA makes a NaN of what is out of range (c10/util/Float8_e4m3fn.h does not), as torch 2.11 does.
    """
    if (
        not FLOAT8_SATURATES
        or dtype != ml_dtypes.float8_e4m3fn
        or np.dtype(x.dtype) == ml_dtypes.float8_e4m3fnuz
    ):
        return x
    bound = x.dtype.type(448)
    return clip(x, -bound, bound)


def promote(*operands: Any) -> tuple[jax.Array, ...]:
    """Operands cast to their promoted dtype."""
    dtype = result_type(*operands)
    return tuple(cast(x, dtype) for x in operands)


def compute(*operands: Any) -> tuple[jax.Array, ...]:
    """Operands cast to the dtype that PyTorch computes an arithmetic op on them in."""
    dtype = op_math(result_type(*operands))
    return tuple(cast(x, dtype) for x in operands)


def compute_float(*operands: Any) -> tuple[jax.Array, ...]:
    """As `compute`, for ops whose result is floating point even on integers."""
    dtype = op_math(float_dtype(result_type(*operands)))
    return tuple(cast(x, dtype) for x in operands)


def is_float(dtype: Any) -> bool:
    """Return whether a dtype is real floating point, the 16- and 8-bit ones included."""
    return jnp.issubdtype(dtype, jnp.floating)


def op_math(dtype: Any) -> np.dtype[Any]:
    """The dtype that PyTorch computes in: float32 for the 16- and 8-bit floats, else ``dtype``."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype

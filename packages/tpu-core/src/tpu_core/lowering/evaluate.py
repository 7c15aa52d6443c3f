"""Evaluate one lowering outside the recorder: on JAX values, or against CPU tensors in tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_core.dtypes import TO_TORCH, cast, to_numpy_dtype
from tpu_core.lowering import checks
from tpu_core.lowering.implementations import implementation
from tpu_core.lowering.registry import Lowering


def call_lowering(
    entry: Lowering,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    key: Any = None,
    contiguous: tuple[bool, ...] | None = None,
) -> Any:
    """Call a lowering under the registry's convention and check its results against ``out``.

    Args:
        entry: The registry's entry.
        args: Positional arguments as JAX values, without the dropped ones.
        kwargs: Keyword arguments, likewise.
        out: Tuple with one item a schema return: a `jax.ShapeDtypeStruct`, a list of them, or None.
        key: ``uint32[2]`` for random ops.
        contiguous: Whether each ``Tensor`` argument is contiguous; all are unless given.

    Returns:
        A tuple with one item a schema return, cast to the dtypes of ``out``.

    Raises:
        TypeError: The lowering returned a shape that PyTorch's meta function does not.
    """
    given = kwargs
    fn = implementation(entry, args, kwargs)
    if entry.random:
        kwargs = {**kwargs, "key": key}
    if entry.wants_out:
        kwargs = {**kwargs, "out": out}
    if entry.wants_contiguous and contiguous is not None:
        kwargs = {**kwargs, "contiguous": contiguous}
    result = fn(*args, **kwargs)
    checks.note(entry.op, args, given, result)
    if not isinstance(result, tuple):
        result = (result,)
    if len(result) != len(out):
        raise TypeError(f"{entry.op}: returned {len(result)} results, the schema has {len(out)}.")
    return tuple(_finish(entry, value, expected) for value, expected in zip(result, out))


def _finish(entry: Lowering, value: Any, expected: Any) -> Any:
    if expected is None:
        return None
    if isinstance(expected, (list, tuple)):
        return [_finish(entry, v, e) for v, e in zip(value, expected, strict=True)]
    value = jnp.asarray(value)
    if value.shape != expected.shape:
        raise TypeError(
            f"{entry.op} ({entry.location}): the lowering returned shape {value.shape}, "
            f"PyTorch's meta function says {expected.shape}."
        )
    return cast(value, expected.dtype)


def drop_arguments(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments without layout, device and the like, which no lowering takes."""
    schema = op._schema.arguments
    kept = [a for a, s in zip(args, schema) if s.name not in Lowering.DROPPED_ARGUMENTS]
    return tuple(kept), {k: v for k, v in kwargs.items() if k not in Lowering.DROPPED_ARGUMENTS}


def weak(x: float | int | bool | complex) -> jax.Array:
    """A Python number as the 0-d weakly typed array that a runtime scalar is."""
    return _identity(x)


@jax.jit
def _identity(x: Any) -> Any:
    return x


def to_jax(t: torch.Tensor) -> jax.Array:
    """A CPU tensor's value as a JAX array (a copy).

    Example:
        >>> copy_to_jax(torch.ones(2))
        Array([1., 1.], dtype=float32)
    """
    t = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dtype = to_numpy_dtype(t.dtype)
    if dtype.kind in "biufc":
        return jnp.array(t.numpy())
    raw = t.view({1: torch.uint8, 2: torch.int16}[t.element_size()]).numpy()
    return jnp.array(raw.view(dtype))


def to_torch(a: Any) -> torch.Tensor:
    """A JAX array's value as a CPU tensor (a copy)."""
    n = np.array(a)
    if n.dtype.kind in "biufc":
        if n.ndim:
            return torch.from_numpy(n)
        return torch.tensor(n.item(), dtype=TO_TORCH[n.dtype], device="cpu")
    raw = torch.from_numpy(n.view({1: np.uint8, 2: np.int16}[n.dtype.itemsize]))
    return raw.view(TO_TORCH[n.dtype])

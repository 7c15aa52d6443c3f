"""The reduction that says whether a program's outputs are finite: one word, read by the host.

A healthy run costs one program that reads each output once, and one transfer of four bytes. It is a
program of its own, so that the checked program computes what it computes without the check.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import jax_settings
from tpu_core.pjrt.padded_array import PaddedArray, on_host
from tpu_core.verification.statistics import non_finite

# Up to so many bytes in one array the array itself is read.
_SMALL = 1 << 14

Spec = tuple[tuple[int, ...], np.dtype[Any], bool]  # shape, dtype, whether it has padding


def all_finite(arrays: Sequence[Any], device: int, client: pjrt.Client) -> bool:
    """Return whether no element of some arrays on a device is a NaN or an infinity; waits.

    Args:
        arrays: A `jax.Array` or `PaddedArray` each; elements of padding do not count.
        device: Index of their device.
        client: The device's client.
    """
    counted = [a for a in arrays if _may_be_non_finite(_inside(a))]
    if not counted:
        return True
    if len(counted) == 1 and _inside(counted[0]).nbytes <= _SMALL:
        return not any(non_finite(pjrt.fetch(on_host(counted[0]))))
    specs = tuple((_inside(a).shape, _inside(a).dtype, isinstance(a, PaddedArray)) for a in counted)
    sizes = [n for a in counted if isinstance(a, PaddedArray) for n in a.shape]
    operands = [_inside(a) for a in counted]
    if sizes:
        operands.append(pjrt.put(np.array(sizes, np.int32), client.devices[device]))
    loaded = _program(specs, device, client)
    (word,) = loaded.execute(operands).consume_with_handlers(loaded.handlers)
    return bool(np.isfinite(np.asarray(word)))


def _inside(array: Any) -> Any:
    return array.array if isinstance(array, PaddedArray) else array


def _may_be_non_finite(array: Any) -> bool:
    return array.size > 0 and jnp.issubdtype(array.dtype, jnp.inexact)


@functools.lru_cache(maxsize=1024)
def _program(specs: tuple[Spec, ...], device: int, client: pjrt.Client) -> pjrt.Loaded:
    """A program of arrays of some shapes, and of the sizes of those with padding if there are."""
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in specs]
    if sizes := sum(len(shape) for shape, _, is_padded in specs if is_padded):
        avals.append(jax.ShapeDtypeStruct((sizes,), np.int32))

    def word(*operands: jax.Array) -> jax.Array:
        total, first = jnp.zeros((), np.float32), 0
        for x, (shape, _, is_padded) in zip(operands, specs, strict=False):
            valid = None
            if is_padded:
                valid = _prefix(shape, operands[-1][first : first + len(shape)])
                first += len(shape)
            parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
            for part in parts:
                total += _zero_if_finite(part, valid)
        return total

    with jax_settings.lowering():
        lowered = jax.jit(word, keep_unused=True).lower(*avals)
    module = pjrt.module_bytes(lowered)
    target = client.devices[device]
    executable = pjrt.compile_module(module, target, client)
    return pjrt.load(executable, [((), np.dtype(np.float32))], target)


def _prefix(shape: tuple[int, ...], sizes: jax.Array) -> jax.Array:
    """A mask of the elements that are no padding."""
    valid = jnp.ones(shape, bool)
    for axis in range(len(shape)):
        valid &= jax.lax.broadcasted_iota(np.int32, shape, axis) < sizes[axis]
    return valid


def _zero_if_finite(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """0, or NaN where an element is not finite: a sum takes half as long as a maximum of flags."""
    if x.dtype.itemsize == 1:
        x = x.astype(np.float32)
    zeros = x * jnp.zeros((), x.dtype)
    if valid is not None:
        zeros = jnp.where(valid, zeros, jnp.zeros((), x.dtype))
    return jnp.sum(zeros, dtype=np.float32)

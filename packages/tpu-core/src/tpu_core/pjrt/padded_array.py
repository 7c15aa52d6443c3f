"""Arrays that are longer than the values that they hold, as they pass between programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_core.pjrt import client as pjrt


class PaddedArray:
    """The value of a storage whose array has padding at the end of some dims.

    Attributes:
        array: The array, a `jax.Array`.
        shape: Shape of what counts of it.
    """

    __slots__ = ("array", "shape")

    def __init__(self, array: Any, shape: tuple[int, ...]) -> None:
        self.array = array
        self.shape = shape

    def is_ready(self) -> bool:
        """Return whether it is computed."""
        return bool(self.array.is_ready())

    def is_deleted(self) -> bool:
        """Return whether it was donated."""
        return self.array.is_deleted()

    def devices(self) -> set[Any]:
        """JAX devices that hold it."""
        return set(self.array.devices())

    def block_until_ready(self) -> PaddedArray:
        """Wait until it is computed."""
        self.array.block_until_ready()
        return self

    def window(self) -> np.ndarray[Any, Any]:
        """Valid part, on the host."""
        return np.asarray(self.array)[tuple(slice(0, n) for n in self.shape)]


def exact(array: Any, device: Any) -> Any:
    """The array without padding."""
    if not isinstance(array, PaddedArray):
        return array
    return pjrt.put(np.ascontiguousarray(array.window()).reshape(array.shape), device)


def blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array whose elements beyond the value do not matter; tests put poison there."""
    return np.zeros(shape, dtype)


def array_of(array: Any) -> Any:
    """The array that holds a value, with its padding."""
    return array.array if isinstance(array, PaddedArray) else array


def fitted(array: Any, shape: Sequence[int], device: Any) -> Any:
    """The array padded to ``shape``; by way of the host, as each shape would need a program.

    What it holds in the padding is never read, so an array of the right shape is taken as it is.
    """
    source = array_of(array)
    if source.shape == tuple(shape):
        return source
    window = array.window() if isinstance(array, PaddedArray) else np.asarray(array)
    padded = blank(tuple(shape), window.dtype)
    padded[tuple(slice(0, n) for n in window.shape)] = window
    return pjrt.put(padded, device)


def on_host(array: Any) -> Any:
    """Valid part of an array, on the host where it has padding."""
    return array.window() if isinstance(array, PaddedArray) else array


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Valid part of an array, in memory of its own."""
    return np.array(on_host(array), order="C", copy=True)


def to_device(array: Any, device: Any) -> Any:
    """A copy on another device."""
    if isinstance(array, PaddedArray):
        return PaddedArray(pjrt.move(array.array, device), array.shape)
    return pjrt.move(array, device)

"""Keys of random ops."""

from __future__ import annotations

from typing import Any

import jax

from tpu_core import _C
from tpu_core.lowering import random


class RandomKey:
    """Keys of random ops: ``uint32[2]`` arrays that are different for every call.

    A key follows from the seed and the offset of a generator, so that programs draw what ops do one
    by one.

    Example:
        >>> ((seed, offset),) = RandomKey.seeds(0, 1)
        >>> words = [n >> shift & 0xFFFFFFFF for n in (seed, offset) for shift in (0, 32)]
        >>> keys = [RandomKey.fold_in(RandomKey.derive(*words), i) for i in range(3)]
    """

    @staticmethod
    def seeds(device: int, count: int) -> list[tuple[int, int]]:
        """Seed and offset of the next draws of a device's generator, which advances.

        Args:
            device: Index of the device.
            count: Number of draws.
        """
        generator = _C.default_generator(device)
        return [_C.next_seed(generator) for _ in range(count)]

    @staticmethod
    def derive(seed_lo: Any, seed_hi: Any, offset_lo: Any, offset_hi: Any) -> jax.Array:
        """The key of a draw.

        Args:
            seed_lo, seed_hi: Low and high 32 bits of the generator's seed.
            offset_lo, offset_hi: Those of its offset.
        """
        return random.derive_key(seed_lo, seed_hi, offset_lo, offset_hi)

    @staticmethod
    def fold_in(key: jax.Array, number: Any) -> jax.Array:
        """An independent key for the ``number``-th draw of one call."""
        return random.fold_in(key, number)

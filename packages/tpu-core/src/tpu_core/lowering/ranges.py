"""``tpu::arange_``: a range whose start and step are run-time inputs and whose length is the
tensor's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_core.dtypes import cast, is_float
from tpu_core.lowering.registry import lowering


@lowering("tpu.arange.default")
def arange(self: jax.Array, start: Any, step: Any) -> jax.Array:
    """``start + i * step``, computed in 64 bits and rounded once, as ATen does on the CPU."""
    dtype = jnp.float64 if is_float(self.dtype) else jnp.int64
    index = lax.iota(dtype, self.shape[0])
    return cast(cast(start, dtype) + index * cast(step, dtype), self.dtype)

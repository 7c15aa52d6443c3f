"""Products with weights of 4 bits as XLA computes them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from tpu_core.array_types import Float, Int32
from tpu_kernels.ops.int4_mm.layout import MIDDLE, numbers
from tpu_kernels.ops.registry import Implementation

PLAIN = Implementation(
    "plain",
    "Builds the weight in the dtype of the rows. `_weight_int4pack_mm` multiplies in eight parts, "
    "as its layout has them.",
)


def int4_mm(
    x: Float[Array, "rows columns"],
    packed: Int32[Array, "columns//8 n"],
    group: int,
    scales_and_zeros: Float[Array, "columns//{group} n 2"],
) -> Float[Array, "rows n"]:
    """See `tpu_kernels.int4_mm`; ``x`` has two dimensions."""
    wide = jnp.promote_types(x.dtype, np.float32)
    spread = jnp.repeat(scales_and_zeros.astype(wide), group, axis=0)
    weight = (numbers(packed) - MIDDLE).astype(wide) * spread[..., 0] + spread[..., 1]
    return jnp.dot(x, weight.astype(x.dtype), preferred_element_type=wide).astype(x.dtype)

"""Products with weights of 4 bits by a kernel that reads them as they are.

A bit of arithmetic makes bfloat16 of them in registers; see `ops.int4_mm.layout`.
"""

from __future__ import annotations

from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import Array

from tpu_core.array_types import Float, Int32
from tpu_kernels.ops.int4_mm import kernel
from tpu_kernels.ops.int4_mm.arguments import OF_CUDA, PACKED
from tpu_kernels.ops.int4_mm.layout import CHUNK, repack
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.registry import Implementation, Rule
from tpu_kernels.ops.rules import HAS_BFLOAT16, ONE_DEVICE

_GROUPS = (32, 64)


def int4_mm(
    x: Float[Array, "rows columns"],
    packed: Int32[Array, "columns//8 n"],
    group: int,
    scales_and_zeros: Float[Array, "columns//{group} n 2"],
) -> Float[Array, "rows n"]:
    """As `tpu_kernels.int4_mm`, for what `PALLAS` takes."""
    if group > CHUNK:
        scales_and_zeros = jnp.repeat(scales_and_zeros, group // CHUNK, axis=0)
    with calling(x.dtype, 2 * x.size * packed.shape[1]):
        return kernel.int4_mm(x, packed.astype(np.int32), min(group, CHUNK), scales_and_zeros)


def of_cuda(
    x: Float[Array, "rows columns"],
    packed: Int32[Array, "tiles columns//128 32 4"],
    group: int,
    scales_and_zeros: Float[Array, "columns//{group} 8*tiles 2"],
) -> Float[Array, "rows 8*tiles"]:
    """As ``aten._weight_int4pack_mm``: the weight is put into the other order for each call."""
    return int4_mm(x, repack(packed), group, scales_and_zeros)


PALLAS = Implementation(
    "pallas",
    "Reads the weight at 4 bits and makes bfloat16 of it in registers. The layout of "
    "`_weight_int4pack_mm` is CUDA's and is turned for each call, which takes ten times as long as "
    "the product of a few rows: `tpu_kernels.int4_repack` does it once.",
    platforms=("tpu",),
    dtypes=("bfloat16",),
    rules=(
        Rule("No dimension is 0.", lambda a, target: 0 not in (*a.rows, *a.packed)),
        Rule(
            "A group has 32 or 64 columns, or a multiple of 128.",
            lambda a, target: a.group in _GROUPS or a.group % CHUNK == 0,
        ),
        Rule(
            "A weight in the layout of CUDA was packed with 8 inner tiles of columns.",
            lambda a, target: len(a.packed) == 2 or a.packed[3] == 4,
        ),
        ONE_DEVICE,
        HAS_BFLOAT16,
    ),
    functions=MappingProxyType({PACKED: int4_mm, OF_CUDA: of_cuda}),
)

"""Grouped products by JAX's megablox kernel, which meets each row once, for its own group.

Of `jax.experimental.pallas.ops.tpu.megablox`, the one for two matrices: the gradient of experts'
weights. Products with a matrix for each group need none: libtpu has a kernel of its own for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from tpu_core.array_types import Float, Int
from tpu_kernels.ops.grouped_mm.arguments import GROUPED_MM
from tpu_kernels.ops.grouped_mm.tiles import tiles
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.registry import Implementation, Rule
from tpu_kernels.ops.rules import HAS_BFLOAT16, ONE_DEVICE

# What jit would cache knows nothing of the interpreter; the function has no annotations.
_kernel: Any = vars(tgmm)["__wrapped__"]


def grouped_mm(
    a: Float[Array, "k left"],
    b: Float[Array, "right n"],
    offs: Int[Array, " groups"],
    bias: None = None,
    out_dtype: torch.dtype | None = None,
    *,
    contiguous: Sequence[bool] = (True, True),
) -> Float[Array, "groups k n"]:
    """As the lowering of ``aten._grouped_mm``, for what `MEGABLOX` takes."""
    (k, left), (right, n) = a.shape, b.shape
    rows = min(left, right)  # those past the last offset may be more on one side
    tiling = tiles(rows, k, n, offs.shape[0], np.dtype(a.dtype).itemsize)
    missing = -rows % tiling[0]
    with calling(a.dtype, 2 * rows * k * n):
        result: Array = _kernel(
            jnp.pad(a[:, :rows], ((0, 0), (0, missing))),
            jnp.pad(b[:rows], ((0, missing), (0, 0))),
            jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(np.int32),
            a.dtype,
            tiling,
        )
    return result


MEGABLOX = Implementation(
    "pallas",
    "The megablox kernel of JAX: each row is multiplied once.",
    platforms=("tpu",),
    dtypes=("bfloat16", "float32"),
    rules=(
        Rule(
            "Both operands have two dimensions, as for the gradient of experts' weights.",
            lambda a, target: len(a.left) == len(a.right) == 2,
        ),
        Rule("No size is 0.", lambda a, target: 0 not in (*a.left, *a.right, a.groups)),
        ONE_DEVICE,
        HAS_BFLOAT16,
    ),
    functions=MappingProxyType({GROUPED_MM: grouped_mm}),
)

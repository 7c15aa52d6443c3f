"""Calls of other libraries' kernels, which know nothing of interpreter and x64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from tpu_core.extend import KernelCost, Target, matmul_precision

# Of a product of float32, as exact as float32.
_PASSES = 6


@contextmanager
def calling(dtype: Any, products: int) -> Iterator[None]:
    """Trace a kernel in the block: by Mosaic for a TPU, by Pallas' interpreter for what is none.

    Args:
        dtype: Of the kernel's operands. Products of float32 are as exact as the precision in force
            asks; Mosaic has one pass of bfloat16 and float32, nothing between.
        products: Floating point operations of its matrix products.
    """
    exact = np.dtype(dtype) == np.float32 and matmul_precision() != "medium"
    # True is the interpreter that leaves plain HLO; `InterpretParams`, which the annotation names,
    # simulates a TPU by callbacks, and a program with callbacks cannot be stored.
    interpreted = cast(Any, True)
    interpreter = (
        nullcontext()
        if Target.current().platform == "tpu"
        else pltpu.force_tpu_interpret_mode(interpreted)
    )
    with (
        jax.enable_x64(False),  # Mosaic has no indices of 64 bits
        jax.default_matmul_precision("highest" if exact else "default"),
        jax.named_scope(KernelCost(products, _PASSES if exact else 1).scope),
        interpreter,
    ):
        yield

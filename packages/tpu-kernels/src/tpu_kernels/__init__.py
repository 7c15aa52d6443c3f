"""JAX functions, Pallas kernels and JAX models as ops and modules of PyTorch on device ``tpu``."""

from __future__ import annotations

from tpu_kernels._version import __version__ as __version__
from tpu_kernels.decorator import JaxOp as JaxOp
from tpu_kernels.decorator import jax_op as jax_op

__all__ = ["JaxOp", "__version__", "jax_op"]

"""JAX functions, Pallas kernels and JAX models as ops and modules of PyTorch on device ``tpu``."""

from __future__ import annotations

from tpu_core.errors import JaxFunctionError as JaxFunctionError
from tpu_core.errors import KernelCompilationError as KernelCompilationError
from tpu_core.errors import KernelRuleError as KernelRuleError
from tpu_kernels._version import __version__ as __version__
from tpu_kernels.calls import FlaxModule as FlaxModule
from tpu_kernels.calls import call_jax as call_jax
from tpu_kernels.calls import from_flax as from_flax
from tpu_kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from tpu_kernels.decorator import JaxOp as JaxOp
from tpu_kernels.decorator import jax_op as jax_op
from tpu_kernels.int4_mm import int4_mm as int4_mm
from tpu_kernels.int4_mm import int4_pack as int4_pack
from tpu_kernels.int4_mm import int4_repack as int4_repack
from tpu_kernels.modules import to_jax_function as to_jax_function
from tpu_kernels.ops.table import using as using
from tpu_kernels.paged_attention import paged_attention as paged_attention
from tpu_kernels.pallas import interpret as interpret
from tpu_kernels.pallas import pallas_call as pallas_call
from tpu_kernels.ragged_paged_attention import ragged_paged_attention as ragged_paged_attention

__all__ = [
    "FlaxModule",
    "JaxFunctionError",
    "JaxOp",
    "KernelCompilationError",
    "KernelRuleError",
    "__version__",
    "call_jax",
    "from_flax",
    "int4_mm",
    "int4_pack",
    "int4_repack",
    "interpret",
    "jax_op",
    "linear_cross_entropy",
    "paged_attention",
    "pallas_call",
    "ragged_paged_attention",
    "to_jax_function",
    "using",
]

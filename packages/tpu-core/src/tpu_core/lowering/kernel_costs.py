"""Cost of a kernel's products, given in the name of its scope.

XLA knows nothing of what is in a kernel. It keeps the names of scopes, so that what reads a
compiled program, such as the plans of ``tpu_compile.aot``, finds the cost there.
"""

from __future__ import annotations

import re

SCOPE = re.compile(r"kernel\(products=(\d+),passes=(\d+)\)/?")
"""A scope's name in HLO; the groups are floating point operations, and passes of each product.

Example:
    >>> KERNEL_SCOPE.search("jit(f)/kernel(products=512,passes=6)/dot")[1]
    '512'
"""


def scope_name(products: int, passes: int = 1) -> str:
    """Name of the scope of a kernel.

    Args:
        products: Floating point operations of its matrix products.
        passes: Passes of each through the matrix unit: 6 for an exact product of float32.

    Example:
        >>> with jax.named_scope(kernel_scope(2 * m * n * k)):
        ...     y = kernel(a, b)
    """
    return f"kernel(products={products},passes={passes})"

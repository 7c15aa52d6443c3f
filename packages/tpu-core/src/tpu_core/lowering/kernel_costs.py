"""Cost of a kernel's products, given in the name of its scope.

XLA knows nothing of what is in a kernel. It keeps the names of scopes, so that what reads a
compiled program, such as the plans of ``tpu_compile.aot``, finds the cost there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SCOPE = re.compile(r"kernel\(products=(\d+),passes=(\d+)\)/?")


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Cost of a kernel's matrix products, as the name of a scope around it states it.

    Attributes:
        products: Floating point operations of its matrix products.
        passes: Passes of each through the matrix unit: 6 for an exact product of float32.

    Example:
        >>> with jax.named_scope(KernelCost(2 * m * n * k).scope):
        ...     y = kernel(a, b)
        >>> KernelCost.find("jit(f)/kernel(products=512,passes=6)/dot")
        KernelCost(products=512, passes=6)
    """

    products: int
    passes: int = 1

    @property
    def scope(self) -> str:
        """Name of the scope."""
        return f"kernel(products={self.products},passes={self.passes})"

    @staticmethod
    def find(text: str) -> KernelCost | None:
        """The cost in the name of an HLO op; None where it has no such scope."""
        found = _SCOPE.search(text)
        return KernelCost(int(found[1]), int(found[2])) if found else None

    @staticmethod
    def without(text: str) -> str:
        """The name of an HLO op without such scopes."""
        return _SCOPE.sub("", text)

"""Errors of JAX functions that are ops of PyTorch."""

from __future__ import annotations

from tpu_core.errors_base import TpuError


class JaxFunctionError(TpuError):
    """A JAX function that was made an op of PyTorch cannot be one, or not for these arguments.

    **How it happens.** `tpu_kernels.jax_op` traces the function once for each set of argument
    shapes. The function raises, keeps a traced value in a global or an attribute, has side effects
    such as a callback or a print, asks for the value of an array, or returns something else than
    its annotations say.

    ```python
    @tpu_kernels.jax_op("my::f")
    def f(x: jax.Array) -> jax.Array:
        if x.sum() > 0:  # asks for a value
            return x
        return -x
    ```

    **How to fix it.** The message says which of these it is. Write the function as for `jax.jit`:
    pure, with `jnp.where` and `lax.cond` in place of branches on values; declare arguments that
    are plain Python values static, by annotating them; return what the annotation says.
    """

    code = "TPU1025"
    remedy = "Write the function as for jax.jit: pure, and of arrays alone."

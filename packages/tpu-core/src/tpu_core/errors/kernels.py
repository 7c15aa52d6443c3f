"""Errors of JAX functions that are ops of PyTorch."""

from __future__ import annotations

from tpu_core.errors.base import TpuError


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


class KernelRuleError(TpuError):
    """An implementation was named that does not take these arguments.

    **How it happens.** Where nothing is named, an op takes the first implementation whose rules
    hold, and its lowering takes everything. `tpu_kernels.using` names one for a block: arguments
    that break one of its rules are then an error, where otherwise another implementation would
    have been taken in silence.

    ```python
    with tpu_kernels.using(attention="pallas"):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # 100 queries: no multiple of 128
    ```

    **How to fix it.** The message says which rule is broken and by what; the table of
    `docs/reference/kernels.md` has the rules of all. Change the shapes, or leave the choice to the
    op.
    """

    code = "TPU1026"
    remedy = "Change what breaks the rule, or name no implementation: the op then chooses."

    def at(self, line: str) -> KernelRuleError:
        """The same error with the user's line, where that is known."""
        if not line:
            return self
        located = type(self)(str(self).replace("\nWhat to do", f"\n  at {line}\nWhat to do", 1))
        located.line, located.values = line, self.values
        return located


class KernelCompilationError(TpuError):
    """Mosaic, which compiles Pallas kernels for TPUs, does not take one.

    **How it happens.** Pallas' interpreter, by which kernels run on other platforms, takes whatever
    JAX computes. Mosaic has rules: blocks of whole tiles, no more than the chip's own memory, fewer
    ops. They are checked where a program is compiled for a TPU, be it there or not.

    ```python
    block = pl.BlockSpec((16, 100), lambda i: (i, 0))  # 100: no multiple of 128
    ```

    **How to fix it.** The message says which rule it is. The tutorial *Write a Pallas kernel* has
    what the common ones are rewritten to.
    """

    code = "TPU1027"
    remedy = "Rewrite the kernel: the tutorial 'Write a Pallas kernel' says how."

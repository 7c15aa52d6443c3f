"""Errors of JAX functions that are ops of PyTorch."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tpu_core.errors.base import TpuError

_PALLAS = f"{os.sep}_src{os.sep}pallas{os.sep}"
_REPORT = re.compile(r"(Please (file|report) an? (issue|bug)|See details) at\S*:? ?\S+")
_PLACE = re.compile(r'loc\(.*?"([^"]+)":(\d+):\d+')
_TOO_MUCH = re.compile(r"Scoped allocation with size (\S+) and limit (\S+) exceeded")
_TILES = (
    "Make the last two sizes of the block multiples of 8 and 128, or those of the whole array; "
    "pad the array where it has fewer."
)
_SMALLER = "Make the blocks smaller: each is in memory twice, while the next one is fetched."
# The libtpu of jax 0.11 names the kernel's module and HLO op there.
_REFUSED = re.compile(r"Mosaic failed to compile TPU kernel(?: with [^\n]*?`)?: ")


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

    @staticmethod
    @contextmanager
    def raising() -> Iterator[None]:
        """Raise errors of Pallas in a block that lowers kernels as `KernelCompilationError`.

        Example:
            >>> with KernelCompilationError.raising():
            ...     lowered = jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
        """
        try:
            yield
        except TpuError:
            raise
        except Exception as error:
            frames = traceback.walk_tb(error.__traceback__)
            if not any(_PALLAS in frame.f_code.co_filename for frame, _ in frames):
                raise
            text = _REPORT.sub("", str(error)).strip()
            raise KernelCompilationError(
                f"Pallas does not lower a kernel for TPUs: {text}",
                remedy=_TILES if "block shape" in text else None,
            ) from error

    @staticmethod
    def of_libtpu(message: str) -> KernelCompilationError | None:
        """The error for a message of libtpu; None where no kernel is to blame.

        Example:
            >>> if (error := KernelCompilationError.of_libtpu(str(xla_error))) is not None:
            ...     raise error
        """
        too_much = _TOO_MUCH.search(message)
        if too_much and "tpu_custom_call" in message:
            return KernelCompilationError(
                "A kernel needs more of the chip's vector memory (VMEM) than it may have.",
                values={"it needs": too_much[1], "limit": too_much[2], **_name(message)},
                remedy=_SMALLER,
            )
        found = _REFUSED.search(message)
        if not found:
            return None
        text = message[found.end() :]
        place = _PLACE.search(text)
        return KernelCompilationError(
            f"Mosaic does not compile a kernel: {text.split(chr(10), maxsplit=1)[0].strip()}",
            values=_name(message),
            line=f"{place[1]}:{place[2]}" if place else None,
        )


def _name(message: str) -> dict[str, object]:
    found = re.search(r'op_name="([^"]+)"', message)
    return {"in": found[1]} if found else {}

"""Errors of exporting programs (`tpu_compile.export`)."""

from __future__ import annotations

from tpu_core.errors.base import TpuError


class ExportError(TpuError, ValueError):
    """A program cannot be written as StableHLO, or what was written cannot be loaded.

    **How it happens.** `tpu_compile.export.save` was given a program that has an op without a
    lowering, draws random numbers, writes its inputs, or computes sizes in a way that JAX's
    symbolic shapes cannot express. Or `load` was given a folder that `save` did not write, or the
    loaded program inputs that it does not take.

    ```pycon
    >>> tpu_compile.export.save(program, "model")
    ExportError: [TPU1050] aten.unique2.default cannot be exported: it has no lowering.
    ```

    **How to fix it.** For sizes, call `torch.export.export` without `dynamic_shapes`, once for each
    size that is needed. For ops, leave them outside of the exported module.
    """

    code = "TPU1050"
    remedy = "Export with fixed sizes, and leave ops without a lowering outside of the module."

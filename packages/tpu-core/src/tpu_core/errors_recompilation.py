"""The warning about a line whose ops are compiled again and again."""

from __future__ import annotations

from tpu_core.errors_base import TpuWarning


class RecompileLimitWarning(TpuWarning):
    """The ops of a line differ from step to step, and reached the limit of programs compiled.

    **How it happens.** Sizes that vary are served by a few programs on padded arrays. Where the ops
    themselves differ, as a loop that joins another number of tensors in each step, or where an op
    has no rule for padded arrays, as the resizing of crops, each step would be another program.
    After `TPU_RECOMPILE_LIMIT` programs for one line (8) what differs runs by PyTorch's CPU kernels
    from then on, and the ops before and after it as programs. The results are the same; on a TPU
    each step copies what that part reads to the host, and waits. What comes again 8 times in a row
    is compiled nevertheless. The warning comes once a line, at the first op that differs.

    ```console
    train.py:31: RecompileLimitWarning: [TPU1020] 8 programs were compiled for this step, and its...
      first op that differs: aten.upsample_bilinear2d.default
      not on padded arrays: the segment: a constant array depends on a size
      from now on: what differs runs by CPU kernels, products aside, and the rest as programs
      step ends at: train.py:34 in step
    ```

    **How to fix it.** Make the steps alike: pad to a few lengths and mask the rest, `torch.where(
    mask, x, 0)` instead of a loop over what the mask selects, one `index_select` instead of a
    `cat` of slices, a resize to one size before the copy to the device. `TPU_RECOMPILE_LIMIT=0`
    compiles each step, `TPU_FALLBACK=error` keeps the CPU out of it;
    `torch.tpu.compile_report()` lists the parts by line, and `TPU_PERFORMANCE_WARNINGS=0` silences
    the warning.
    """

    code = "TPU1020"
    remedy = (
        "Make the steps alike: pad to a few sizes and mask the rest (torch.where(mask, x, 0)). "
        "TPU_RECOMPILE_LIMIT=0 lifts the limit, TPU_PERFORMANCE_WARNINGS=0 silences this."
    )

"""Errors of programs that are compiled again, without end, or in the background."""

from __future__ import annotations

from tpu_core.errors.base import TpuError, TpuWarning


class RecompileLimitWarning(TpuWarning):
    """The ops of a line differ from step to step, and reached the limit of programs compiled.

    **How it happens.** Sizes that vary are served by a few programs on padded arrays. Where the ops
    themselves differ, as a loop that joins another number of tensors in each step, or where an op
    has no rule for padded arrays, as FFTs of long signals, each step would be another program.
    After `TPU_RECOMPILE_LIMIT` programs for one line (8) what differs runs by PyTorch's CPU kernels
    from then on. So do the ops before and after it, until that has taken as long as to compile
    them. The results are the same; on a TPU each step copies what a part reads to the host, and
    waits. What comes again 8 times in a row is compiled nevertheless. The warning comes once a
    line, at the first op that differs.

    ```console
    train.py:31: RecompileLimitWarning: [TPU1022] 8 programs were compiled for this step, and its...
      first op that differs: aten._fft_r2c.default
      not on padded arrays: train.py:31/aten._fft_r2c: a Fourier transform over sizes of more ...
      from now on: what differs runs by CPU kernels, the rest too until a program of it pays
      step ends at: train.py:34 in step
    ```

    **How to fix it.** Make the steps alike: pad to a few lengths and mask the rest, `torch.where(
    mask, x, 0)` instead of a loop over what the mask selects, one `index_select` instead of a
    `cat` of slices, `torch.fft.rfft(x, n=longest)` in place of one of each length.
    `TPU_RECOMPILE_LIMIT=0` compiles each step, `TPU_FALLBACK=error` keeps the CPU out of it;
    `torch.tpu.compile_report()` lists the parts by line, and `TPU_PERFORMANCE_WARNINGS=0` silences
    the warning.
    """

    code = "TPU1022"
    remedy = (
        "Make the steps alike: pad to a few sizes and mask the rest (torch.where(mask, x, 0)). "
        "TPU_RECOMPILE_LIMIT=0 lifts the limit, TPU_PERFORMANCE_WARNINGS=0 silences this."
    )


class RecompilationError(TpuError):
    """A program was compiled inside `torch.tpu.no_recompile()`.

    **How it happens.** The block promises that everything in it has been compiled before; a new
    shape, dtype or Python constant broke that. The message says which op or argument is new, and
    against what.

    ```python
    with torch.tpu.no_recompile():
        for batch in loader:  # the last batch is shorter
            step(batch)
    ```

    **How to fix it.** Keep shapes constant (`DataLoader(drop_last=True)`, padding), pass numbers
    that change as tensors, and warm up with each shape before the block.
    `torch.tpu.compile_report()` lists every compile with its reason.
    """

    code = "TPU1014"
    # What could not be compiled stays recorded, and runs once that is allowed again.
    is_interruption = True
    remedy = "Keep the argument named above constant, or run it once before the block."


class BackgroundCompileWarning(TpuWarning):
    """A program could not be compiled in the background, and runs op by op.

    **How it happens.** With `TPU_COMPILE=background` a process of its own compiles what already
    runs op by op. That process was ended twice, most often by the system for want of memory. To
    compile the same in the training process would put that one at risk, so the program stays as it
    is: its results are right, and it is as slow as in strict mode.

    ```console
    BackgroundCompileWarning: [TPU1018] The process that compiled 1,840 ops ended twice.
    ```

    **How to fix it.** Look for the out-of-memory killer in the system's log. Programs are smaller
    with a lower `TPU_SEGMENT_OPS`; fewer compile at once with `TPU_COMPILE_WORKERS=1`.
    `TPU_COMPILE=blocking` compiles in the process itself.
    """

    code = "TPU1018"
    remedy = (
        "If memory is short, set TPU_SEGMENT_OPS lower. TPU_COMPILE=blocking compiles in the "
        "training process."
    )

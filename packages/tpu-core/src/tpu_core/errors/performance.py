"""Warnings about time that the device or its caller waits."""

from __future__ import annotations

from tpu_core.errors.base import TpuWarning


class HostSyncWarning(TpuWarning):
    """A line of a loop reads from the device in nearly every step.

    **How it happens.** `loss.item()`, `float(loss)`, `if loss > 1`, `print(loss)`, `.cpu()` and
    `x[mask]` need a value now. The host waits until everything before is computed, and the device
    then waits until the host has recorded the next step. The warning comes once a line, when the
    line has read 20 times with no compile in between, each time leaving the device without work,
    and more often than every third optimizer step, or, where no optimizer steps, than every fifth
    program. A loss that is read every tenth step does not bring it, nor does the loss of the step
    before while the next one runs.

    ```console
    train.py:31: HostSyncWarning: [TPU1016] This line reads from the device in nearly every step...
    ```

    **How to fix it.** Add up on the device and read every so many steps:

    ```python
    total += loss.detach()
    if step % 50 == 49:
        print(total.item() / 50)
        total.zero_()
    ```

    `torch.where(mask, x, 0)` instead of `x[mask]` keeps the shape, so that nothing is read.
    `TPU_PERFORMANCE_WARNINGS=0` silences this; `torch.tpu.compile_report()` lists all such lines.
    """

    code = "TPU1016"
    remedy = (
        "Add up on the device (total += loss.detach()) and read every so many steps. "
        "TPU_PERFORMANCE_WARNINGS=0 silences this."
    )


class InputPipelineWarning(TpuWarning):
    """The device waits for batches.

    **How it happens.** Making a batch takes longer than the step before it runs on the device, so
    that the device has nothing to do until the batch is there. It is measured over 20 batches of a
    `DataLoader` in which nothing is compiled; the warning comes once, where the device waited at
    least a fifth of the time and a millisecond a batch.

    ```console
    InputPipelineWarning: [TPU1017] The device waits for the DataLoader 62% of the time.
      a batch: 31.4 ms waited of 50.6 ms, over 20 batches
      num_workers: 0
      at train.py:20 in train
    ```

    **How to fix it.** `num_workers=4` makes batches in other processes while the device runs,
    `persistent_workers=True` keeps those over epochs, and `prefetch_factor` lets them run further
    ahead. Where they cannot keep up, do less for each sample: decode and resize once and store the
    result, read large files, collate arrays rather than Python objects.
    `TPU_PERFORMANCE_WARNINGS=0` silences this.
    """

    code = "TPU1017"
    remedy = (
        "Make batches in more processes (DataLoader(num_workers=4, persistent_workers=True)), or "
        "do less for each sample. TPU_PERFORMANCE_WARNINGS=0 silences this."
    )

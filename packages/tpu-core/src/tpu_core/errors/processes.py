"""Errors of tensors that meet another process: a fork, a queue, a worker."""

from __future__ import annotations

from tpu_core.errors.base import TpuError


class ForkedProcessError(TpuError):
    """The device is used in a process that was forked after the device had started.

    **How it happens.** A PJRT client has threads, which do not exist in a forked child. A
    `DataLoader` worker that makes `tpu` tensors, or `multiprocessing` with the start method
    `fork`, runs into this. Workers that only touch CPU tensors are fine.

    ```python
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, i):
            return torch.ones(2, device="tpu")  # raises ForkedProcessError in a worker
    ```

    **How to fix it.** Return CPU tensors from workers and move the batch in the main process with
    `batch.to("tpu")`. Where the child needs the device, start it by spawn:
    `torch.multiprocessing.set_start_method("spawn")`.
    """

    code = "TPU1004"
    remedy = (
        "Make CPU tensors in the worker and move them in the parent process, or start processes "
        'with torch.multiprocessing.set_start_method("spawn").'
    )


class ProcessSharingError(TpuError):
    """A tensor of the device was put on its way to another process.

    **How it happens.** Memory of the device belongs to the process that made it. A tensor in a
    `multiprocessing` queue or pipe, in the arguments of a process that is spawned, or in what a
    `DataLoader` worker returns, cannot be read on the other side. Pipes, `SimpleQueue` and
    `Process.start()` raise in the sender. `Queue.put()` only hands the object to a thread, which
    pickles it later: the error is sent in its place, and `get()` raises it in the reader, or the
    `DataLoader` in the loop over its batches.

    ```python
    queue = torch.multiprocessing.Queue()
    queue.put(loss)  # a tensor on 'tpu': the reader's get() raises
    queue.put(loss.cpu())  # or loss.item(), or loss.cpu().numpy()
    ```

    **How to fix it.** Send `tensor.cpu()`, a number, or a NumPy array, and move it in the reader
    with `.to("tpu")`. Workers of a `DataLoader` return CPU tensors; move the batch in the main
    process. Between the ranks of a job use `torch.distributed`.
    """

    code = "TPU1020"
    remedy = (
        'Send tensor.cpu() or a NumPy array and move it in the reader with .to("tpu"). Workers of '
        "a DataLoader return CPU tensors; the main process moves the batch."
    )

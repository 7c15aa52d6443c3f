"""Errors of collectives. As in `tpu_core.errors`, the docstrings are sections of the docs page."""

from __future__ import annotations

import torch

from tpu_core.errors.base import TpuError, TpuWarning


class ProcessGroupError(TpuError):
    """A process group cannot be made, or cannot be used any more.

    **How it happens.** On a TPU the device was used before `init_process_group`: how a process sees
    the other chips is settled when the device starts. Or an earlier collective of the group failed:
    where its processes stand is not known any more, and each further collective says so. Or
    processes have different secrets of the job (`TPU_JOB_SECRET`), or did not all come in time.

    ```pycon
    >>> x = torch.ones(2, device="tpu")
    >>> torch.distributed.init_process_group()
    ProcessGroupError: [TPU1030] The device was used before the process group was made.
    ```

    **How to fix it.** Call `torch.distributed.init_process_group()` first. After a failure make a
    new group, `destroy_process_group()` and `init_process_group()`, in all processes that are left.
    """

    code = "TPU1030"
    remedy = "Make a new group in all processes that are left: destroy_process_group() and init."


class CollectiveMismatchError(TpuError):
    """Processes of a group called different collectives.

    **How it happens.** Ranks came to different lines (`if rank == 0: dist.barrier()`), called the
    same collectives in another order, or the same one with another shape, dtype, reduce op or root.
    Or split sizes of an `all_to_all` disagree: the message names what one rank sends and what the
    other one expects. It is found before anything is sent, and raised in all processes of the
    group.

    ```console
    CollectiveMismatchError: [TPU1031] Ranks of group '0' called different collectives.
      rank 0: all_reduce sum float32[4] at train.py:31
      rank 1: broadcast from 0 float32[4] at train.py:40
    ```

    **How to fix it.** Look at the lines: each rank of the group must call the same collectives in
    the same order. What only some ranks do belongs into a group of theirs
    (`torch.distributed.new_group`). The group itself can still be used.
    """

    code = "TPU1031"
    remedy = "Make every rank of the group call the same collectives in the same order."


class CollectiveTimeoutError(TpuError, torch.distributed.DistBackendError):
    """Other processes did not come to a collective in time.

    **How it happens.** Some ranks are late: stopped, in an endless loop, in a much longer step, or
    waiting for another collective. The time is the group's (`init_process_group(timeout=...)`, half
    an hour unless given), or the call's.

    ```console
    CollectiveTimeoutError: [TPU1032] A collective did not start within 30 s.
      call: all_reduce sum float32[4]
      missing: rank 1
      at train.py:31
    ```

    **How to fix it.** Look at what the missing ranks were doing. If the wait was justified, make
    the group with a longer timeout. The group cannot be used any more; the process can.
    """

    code = "TPU1032"
    remedy = "See what the missing ranks were doing, or make the group with a longer timeout."


class PeerLostError(TpuError, torch.distributed.DistBackendError):
    """Another process of the group has ended.

    **How it happens.** It crashed, was killed (by the system for want of memory, say), or called
    `sys.exit` or `destroy_process_group` while others still had collectives to do with it.

    ```console
    PeerLostError: [TPU1033] A process of group '0' was lost.
      call: all_reduce sum float32[4]
      at train.py:31
    ```

    **How to fix it.** Look at the first error that any process printed. Values on the device are
    as they were: save them, or make a new group of the processes that are left and go on. `torchrun
    --max-restarts` starts all processes again.
    """

    code = "TPU1033"
    remedy = "Look at the first error that any process printed; this one is a consequence."


class SpmdMismatchWarning(TpuWarning):
    """Ranks ran different programs in a region that `tpu_distributed.spmd()` declares.

    **How it happens.** In such a region collectives are parts of the programs that ranks record.
    Before a program runs the ranks compare it. Here one had other ops, shapes or dtypes than
    another, or other results were still in use after it (`if rank == 0: print(loss)`). The values
    are right nevertheless: the collectives were executed one by one, as outside of the region,
    and so are those that follow until it ends. A rank that calls other *collectives* than another
    gets a `CollectiveMismatchError`, in the region and out of it.

    ```console
    SpmdMismatchWarning: [TPU1034] Ranks of group '0' run different programs in spmd().
      rank 0: aten.mul.Tensor float32[4] at train.py:12
      rank 1: aten.add.Tensor float32[4] at train.py:14
    ```

    **How to fix it.** Move what only some ranks do out of the region, or do it on all ranks.
    """

    code = "TPU1034"
    remedy = "Move what only some ranks do out of the region, or do it on all ranks."

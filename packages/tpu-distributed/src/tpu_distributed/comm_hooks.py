"""Communication hooks of DistributedDataParallel."""

# No postponed annotations: DistributedDataParallel compares those of a hook.

import torch
import torch.distributed as dist


def bf16_compression_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in bfloat16: half of what float32 takes on the way.

    PyTorch's own ``bf16_compress_hook`` is refused on devices other than CUDA and XPU.

    Args:
        process_group: Group of the ranks to average over; the default group where None.
        bucket: Gradients of one dtype, which they keep.

    Returns:
        Of the averaged gradients, with 8 bits of precision.

    Example:
        >>> model.register_comm_hook(None, tpu_distributed.bf16_compression_hook)
    """
    group = process_group or dist.group.WORLD
    assert group is not None
    gradients = bucket.buffer()
    small = gradients.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None

    def copied(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradients.copy_(future.value()[0])

    return work.get_future().then(copied)

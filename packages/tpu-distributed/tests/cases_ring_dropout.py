"""Attention over a divided sequence with dropout: its programs take long to compile."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from cases_context_parallel import METHODS, RANK, SIZE, divided, made


def case_the_backward_pass_drops_what_the_forward_pass_did() -> None:
    torch.accelerator.set_device_index(RANK)
    mesh, whole = init_device_mesh("tpu", (SIZE,)), made()
    for method in METHODS:
        with divided(whole, mesh, method) as parts:
            out = F.scaled_dot_product_attention(*parts, dropout_p=0.5, is_causal=True)
            out.sum().backward()
            value = parts[2]
            assert value.grad is not None
            # The output is linear in the values, whatever is dropped.
            sums = torch.stack([out.detach().sum(), (value * value.grad).detach().sum()])
            without = F.scaled_dot_product_attention(*parts, is_causal=True)
            assert not torch.equal(without.detach().cpu(), out.detach().cpu())
        dist.all_reduce(sums)
        assert_close(sums[0].cpu(), sums[1].cpu(), rtol=1e-4, atol=1e-4)
    dist.barrier()
    dist.destroy_process_group()

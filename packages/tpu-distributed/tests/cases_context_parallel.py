"""Attention over a sequence that is divided over processes, as one process on the CPU does it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _context_parallel, context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.testing import assert_close

import tpu_distributed

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)
METHODS = ("allgather", "alltoall")


def case_start() -> None:
    torch.accelerator.set_device_index(RANK)
    dist.init_process_group()


def made(heads: Sequence[int] = (4, 4, 4), rows: int = 8 * SIZE) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, rows, 4) for n in heads]


def own(t: torch.Tensor, is_balanced: bool) -> torch.Tensor:
    """This process's rows; balanced, of the first half of the sequence and of the second."""
    if not is_balanced:
        return t.chunk(SIZE, 2)[RANK]
    pieces = t.chunk(2 * SIZE, 2)
    return torch.cat([pieces[RANK], pieces[-1 - RANK]], 2)


@contextmanager
def divided(
    whole: list[torch.Tensor], mesh: DeviceMesh, method: str, is_balanced: bool = True
) -> Iterator[list[torch.Tensor]]:
    """This process's parts of queries, keys and values, where attention is to those of all."""
    options = _context_parallel._attention._cp_options
    before = options.enable_load_balance
    options.enable_load_balance = is_balanced
    set_rotate_method(method)
    parts = [t.to(DEVICE) for t in whole]
    try:
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            for part in parts:
                part.requires_grad_()
            yield list(parts)
            for part in parts:
                part.requires_grad_(False)
    finally:
        options.enable_load_balance = before
        set_rotate_method("allgather")


def compare(heads: Sequence[int], is_causal: bool, method: str, is_balanced: bool) -> None:
    """Output and gradients of this process's part, with those of one process."""
    mesh, whole = init_device_mesh("tpu", (SIZE,)), made(heads)
    options: Any = {"scale": 0.7, "enable_gqa": heads[0] != heads[1]}
    with divided(whole, mesh, method, is_balanced) as parts:
        out = F.scaled_dot_product_attention(
            *parts, is_causal=is_causal, scale=0.7, enable_gqa=True
        )
        assert out.shape[2] == whole[0].shape[2] // SIZE
        out.square().sum().backward()
        found = [out.detach(), *(part.grad for part in parts)]
    inputs = [t.clone().requires_grad_() for t in whole]
    out = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, **options)
    out.square().sum().backward()
    for actual, right in zip(found, [out.detach(), *(t.grad for t in inputs)], strict=True):
        assert_close(actual.cpu(), own(right, is_balanced), rtol=1e-4, atol=1e-5)


def case_causal() -> None:
    for method, is_balanced in product(METHODS, (True, False)):
        compare((4, 4, 4), True, method, is_balanced)


def case_put_together_again() -> None:
    mesh, whole = init_device_mesh("tpu", (SIZE,)), made()
    with divided(whole, mesh, "alltoall") as parts:
        out = F.scaled_dot_product_attention(*parts, is_causal=True).detach()
        (found,) = context_parallel_unshard(mesh, [out], [2])
    correct = F.scaled_dot_product_attention(*whole, is_causal=True)
    assert_close(found.cpu(), correct, rtol=1e-4, atol=1e-5)


def case_not_causal_and_grouped_queries() -> None:
    for method in METHODS:  # two heads of queries for one of keys
        compare((4, 2, 2), False, method, True)


def case_what_is_not_there() -> None:
    mesh = init_device_mesh("tpu", (SIZE,))
    for method in METHODS:
        with divided(made(), mesh, method) as parts:
            mask = torch.zeros(1, 1, 8, 8 * SIZE, device=DEVICE)
            with pytest.raises(NotImplementedError, match="no attn_mask"):
                F.scaled_dot_product_attention(*parts, mask)
            if method == "alltoall":
                parts[0] = parts[0][:, :, :4]
                with pytest.raises(NotImplementedError, match="keys as queries, not 8 for 4"):
                    F.scaled_dot_product_attention(*parts, is_causal=True)


def case_memory_of_a_ring_is_that_of_one_part() -> None:
    if SIZE < 4:
        return  # two sizes are compared
    pairs = init_device_mesh("tpu", (SIZE // 2, 2), mesh_dim_names=("pair", "sequence"))
    peaks = {}
    for mesh, method in product((init_device_mesh("tpu", (SIZE,)), pairs["sequence"]), METHODS):
        with divided(made(rows=256 * mesh.size()), mesh, method) as parts:
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            F.scaled_dot_product_attention(*parts).sum().backward()
            torch.accelerator.synchronize()
            peaks[mesh.size(), method] = torch.accelerator.max_memory_allocated() - before
    # The same rows for each process, in a sequence that is twice as long.
    assert peaks[SIZE, "alltoall"] == pytest.approx(peaks[2, "alltoall"], rel=0.1), peaks
    assert peaks[SIZE, "allgather"] > 1.5 * peaks[2, "allgather"], peaks


def case_permutation() -> None:
    to = [*range(1, SIZE), 0]
    x = torch.arange(3.0, device=DEVICE) + 10 * RANK
    received = funcol.permute_tensor(x, to, dist.group.WORLD)
    assert received.tolist() == (torch.arange(3.0) + 10 * ((RANK - 1) % SIZE)).tolist()
    record = tpu_distributed.flight_recorder().records()[-1]
    assert (record["kind"], record["state"]) == ("all_to_all", "done")


def case_end() -> None:
    dist.barrier()
    dist.destroy_process_group()

"""Collectives that fuse into the programs of `tpu_distributed.spmd()`."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import tpu_distributed
from rank_tensors import DEVICE, RANK, SIZE
from tpu_core.errors import SpmdMismatchWarning

TOTAL = SIZE * (SIZE + 1) / 2


def started() -> int:
    """Programs that ran so far; every program counts, those of single collectives too."""
    return int(torch.tpu.metrics()["executions"])


def case_one_program() -> None:
    dist.init_process_group()
    x = torch.full((4,), 1.0 + RANK, device=DEVICE)
    for _ in range(3):
        with tpu_distributed.spmd():
            before = started()
            y = x * 2
            dist.all_reduce(y)
            z = y + 1
        assert started() == before + 1
        assert z.tolist() == [2 * TOTAL + 1] * 4
        assert y.tolist() == [2 * TOTAL] * 4
        assert started() == before + 1

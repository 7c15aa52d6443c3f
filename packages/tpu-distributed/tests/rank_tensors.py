"""Tensors of the cases: other numbers on each rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("tpu", RANK)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Other numbers on each rank, small enough for every dtype."""
    generator = torch.Generator().manual_seed(100 * seed + RANK)
    numbers = torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator)
    return numbers.to(dtype)


def flat(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    assert isinstance(value, (list, tuple))
    return [t for v in value for t in flat(v)]


def everyones(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, on the CPU; gloo's collectives know half of the dtypes."""
    tensors: list[torch.Tensor] = [x] * SIZE
    dist.all_gather_object(tensors, x.cpu())
    return tensors

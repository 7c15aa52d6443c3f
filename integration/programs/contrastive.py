"""Contrastive learning as in MoCo: a momentum encoder and a queue of keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

DIM, KEYS, BATCH = 32, 512, 32


def encoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, DIM)),
    )


def views(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Flip, shift and brighten a batch."""
    if torch.rand((), generator=g) < 0.5:
        x = x.flip(-1)
    x = x.roll(tuple(torch.randint(-3, 4, (2,), generator=g).tolist()), dims=(2, 3))
    return x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1, generator=g).to(x.device))


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    of_queries = encoder().to(device)
    of_keys = copy.deepcopy(of_queries).requires_grad_(False)
    queue = F.normalize(torch.randn(DIM, KEYS, generator=g), dim=0).to(device)
    place = 0
    optimizer = torch.optim.SGD(of_queries.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    while True:
        x = torch.randn(BATCH, 3, 24, 24, generator=g).to(device)
        q = F.normalize(of_queries(views(x, g)), dim=1)
        with torch.no_grad():
            for slow, fast in zip(of_keys.parameters(), of_queries.parameters()):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            k = F.normalize(of_keys(views(x, g)), dim=1)
        positive = torch.einsum("nc,nc->n", q, k)[:, None]
        negative = torch.einsum("nc,ck->nk", q, queue.clone())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[:, place : place + BATCH] = k.T
        place = (place + BATCH) % KEYS
        yield loss.item()

"""k-means: seeds far apart, then Lloyd's steps until no point changes its cluster."""

from __future__ import annotations

from collections.abc import Iterator

import torch

POINTS, DIM, CLUSTERS = 600, 8, 12


def seeds(x: torch.Tensor, first: int) -> torch.Tensor:
    """Each next seed is the point that is farthest from those before."""
    chosen = x[first : first + 1]
    for _ in range(CLUSTERS - 1):
        nearest = torch.cdist(x, chosen).min(dim=1).values
        chosen = torch.cat([chosen, x[nearest.argmax()].unsqueeze(0)])
    return chosen


def run(device: str) -> Iterator[float]:
    g = torch.Generator().manual_seed(1)
    while True:
        middles = 4 * torch.randn(CLUSTERS, DIM, generator=g)
        own = torch.randint(CLUSTERS, (POINTS,), generator=g)
        x = (middles[own] + torch.randn(POINTS, DIM, generator=g)).to(device)
        centres = seeds(x, int(torch.randint(POINTS, (), generator=g)))
        before = torch.full((POINTS,), -1, device=device)
        rounds = 0
        while True:
            cluster = torch.cdist(x, centres).argmin(dim=1)
            rounds += 1
            if torch.equal(cluster, before) or rounds == 20:
                break
            before = cluster
            sums = torch.zeros_like(centres).index_add_(0, cluster, x)
            counts = torch.bincount(cluster, minlength=CLUSTERS)
            filled = counts > 0
            centres[filled] = sums[filled] / counts[filled, None]
        inertia = (x - centres[cluster]).square().sum().item()
        yield rounds + inertia / POINTS

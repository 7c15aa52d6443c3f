"""A* with a learned heuristic: a heap on the host, batches of neighbours valued by a network."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

SIDE = 12
Cell = tuple[int, int]


class Heuristic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.value = nn.Sequential(nn.Linear(8 + 2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        own = features[:, cells[:, 0], cells[:, 1]].T
        far = (SIDE - 1 - cells).float()
        return F.softplus(self.value(torch.cat([own, far], dim=1))[:, 0]) + far.sum(1) / 2


def search(model: Heuristic, walls: torch.Tensor) -> tuple[list[Cell], int]:
    """A path from corner to corner, and the number of cells looked at."""
    device = next(model.parameters()).device
    blocked = walls.bool().tolist()
    with torch.no_grad():
        features = model.grid(walls[None].to(device))
    heap: list[tuple[float, int, Cell, Cell | None]] = [(0.0, 0, (0, 0), None)]
    parents: dict[Cell, Cell | None] = {}
    while heap:
        _, cost, cell, parent = heapq.heappop(heap)
        if cell in parents:
            continue
        parents[cell] = parent
        if cell == (SIDE - 1, SIDE - 1):
            path, at = [], cell
            while at is not None:
                path.append(at)
                at = parents[at]
            return path, len(parents)
        r, c = cell
        near = [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
        near = [n for n in near if all(0 <= k < SIDE for k in n) and n not in parents]
        near = [n for n in near if not blocked[n[0]][n[1]]]
        if near:
            with torch.no_grad():
                values = model(features, torch.tensor(near, device=device)).tolist()
            for n, value in zip(near, values):
                heapq.heappush(heap, (round(cost + 1 + value, 3), cost + 1, n, cell))
    return [], len(parents)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Heuristic().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    while True:
        walls = (torch.rand(SIDE, SIDE, generator=g) < 0.15).float()
        walls[0, 0] = walls[-1, -1] = 0
        path, seen = search(model, walls)
        if path:
            cells = torch.tensor(path, device=device)
            left = torch.arange(len(path), device=device, dtype=torch.float)
            loss = F.mse_loss(model(model.grid(walls[None].to(device)), cells), left)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield seen + len(path) + (loss.item() if path else 0.0)

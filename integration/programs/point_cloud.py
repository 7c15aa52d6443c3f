"""Point clouds: edge convolutions over the k nearest neighbours, farthest point sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

NEIGHBOURS, CLASSES = 8, 6


def neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, x).topk(NEIGHBOURS, dim=-1, largest=False).indices


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of each cloud: ``[batch, points, k, features]``."""
    return x[torch.arange(len(x), device=x.device)[:, None, None], index]


def farthest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of points far from each other, ``[batch, count]``."""
    batch = torch.arange(len(x), device=x.device)
    distance = torch.full(x.shape[:2], torch.inf, device=x.device)
    last = torch.zeros(len(x), dtype=torch.long, device=x.device)
    chosen = [last]
    for _ in range(count - 1):
        distance = torch.minimum(distance, (x - x[batch, last][:, None]).square().sum(-1))
        last = distance.argmax(1)
        chosen.append(last)
    return torch.stack(chosen, 1)


class EdgeConv(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * a, b), nn.LeakyReLU(0.2), nn.Linear(b, b))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        near = gather(x, index)
        own = x.unsqueeze(2).expand_as(near)
        return self.net(torch.cat([own, near - own], dim=-1)).amax(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = EdgeConv(3, 32), EdgeConv(32, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x, neighbours(x))
        kept = farthest(x, 16)
        h = h.gather(1, kept[..., None].expand(-1, -1, h.shape[-1]))
        return self.head(self.second(h, neighbours(h.detach())).amax(1))


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        points = int(torch.randint(40, 80, (), generator=g))
        y = torch.randint(CLASSES, (8,), generator=g)
        x = torch.randn(8, points, 3, generator=g) * (1 + y)[:, None, None]
        loss = F.cross_entropy(model(x.to(device)), y.to(device), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()

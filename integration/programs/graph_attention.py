"""Graph attention with a softmax over each node's edges, on samples of one large graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

NODES, FEATURES, HEADS, DIM, CLASSES = 1000, 24, 4, 16, 6


class Attention(nn.Module):
    def __init__(self, into: int) -> None:
        super().__init__()
        self.project = nn.Linear(into, HEADS * DIM, bias=False)
        self.source = nn.Parameter(torch.randn(HEADS, DIM) * 0.3)
        self.target = nn.Parameter(torch.randn(HEADS, DIM) * 0.3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.project(x).view(-1, HEADS, DIM)
        source, target = edges
        score = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        score = F.leaky_relu(score, 0.2)
        index = target[:, None].expand_as(score)
        largest = score.new_full((len(x), HEADS), -torch.inf)
        largest = largest.scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - largest[target]).exp()
        total = weight.new_zeros(len(x), HEADS).scatter_add(0, index, weight)
        weight = weight / total[target]
        out = h.new_zeros(len(x), HEADS, DIM).index_add(0, target, weight[..., None] * h[source])
        return out.flatten(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(FEATURES), Attention(HEADS * DIM)
        self.head = nn.Linear(HEADS * DIM, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.head(F.elu(self.second(F.elu(self.first(x, edges)), edges)))


def subgraph(edges: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Edges between the nodes that are kept, with those nodes' new numbers, and loops."""
    mask = torch.zeros(NODES, dtype=torch.bool, device=kept.device)
    mask[kept] = True
    number = torch.cumsum(mask, 0) - 1
    inner = number[edges[:, mask[edges[0]] & mask[edges[1]]]]
    loops = torch.arange(len(kept), device=kept.device).expand(2, -1)
    return torch.cat([inner, loops], dim=1)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, FEATURES, generator=g).to(device)
    edges = torch.randint(NODES, (2, 8 * NODES), generator=g).to(device)
    y = torch.randint(CLASSES, (NODES,), generator=g).to(device)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    while True:
        kept = torch.randperm(NODES, generator=g)[:300].sort().values.to(device)
        logits = model(x[kept], subgraph(edges, kept))
        loss = F.cross_entropy(logits, y[kept])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(1) == y[kept]).float().mean()
        yield loss.item() + right.item()

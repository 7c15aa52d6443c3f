"""Message passing over another graph in each step: gather, index_add, scatter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

FEATURES, HIDDEN, CLASSES = 16, 64, 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.update = nn.GRUCell(width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], dim=1))
        total = torch.zeros_like(nodes).index_add(0, target, messages)
        degree = torch.zeros(len(nodes), device=nodes.device)
        degree.scatter_add_(0, target, torch.ones_like(target, dtype=torch.float))
        return self.update(total / degree.clamp(min=1)[:, None], nodes)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN)
        self.layers = nn.ModuleList(Layer(HIDDEN) for _ in range(3))
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, graphs: int
    ) -> torch.Tensor:
        nodes = self.embed(x)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        index = graph[:, None].expand_as(nodes)
        empty = nodes.new_zeros(graphs, HIDDEN)
        largest = empty.scatter_reduce(0, index, nodes, "amax", include_self=False)
        mean = empty.scatter_reduce(0, index, nodes, "mean", include_self=False)
        return self.head(torch.cat([largest, mean], dim=1))


def batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Several graphs as one: nodes, edges, the graph of each node, labels."""
    sizes = torch.randint(5, 30, (8,), generator=g)
    start, edges = 0, []
    for size in sizes.tolist():
        edges.append(start + torch.randint(size, (2, 3 * size), generator=g))
        start += size
    x = torch.randn(start, FEATURES, generator=g)
    graph = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return x, torch.cat(edges, dim=1), graph, torch.randint(CLASSES, (len(sizes),), generator=g)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = GraphNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        x, edges, graph, y = (t.to(device) for t in batch(g))
        loss = F.cross_entropy(model(x, edges, graph, len(y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()

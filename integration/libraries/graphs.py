"""torch_geometric: convolutions over graphs of any size, pooling, graphs of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 8


def _layers() -> dict[str, Callable[[], nn.Module]]:
    import torch_geometric.nn as layers

    return {
        "GCNConv": lambda: layers.GCNConv(DIM, DIM),
        "GATv2Conv": lambda: layers.GATv2Conv(DIM, 4, heads=2),
        "SAGEConv": lambda: layers.SAGEConv(DIM, DIM),
        "GINConv": lambda: layers.GINConv(nn.Linear(DIM, DIM)),
        "EdgeConv": lambda: layers.EdgeConv(nn.Linear(2 * DIM, DIM)),
        "TransformerConv": lambda: layers.TransformerConv(DIM, 4, heads=2),
        "ChebConv": lambda: layers.ChebConv(DIM, DIM, 3),
        "GatedGraphConv": lambda: layers.GatedGraphConv(DIM, 2),
    }


def _batch(generator: torch.Generator) -> Any:
    from torch_geometric.data import Batch, Data

    def graph() -> Data:
        nodes = int(torch.randint(5, 11, (), generator=generator))
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        label = torch.randint(3, (1,), generator=generator)
        return Data(torch.randn(nodes, DIM, generator=generator), edges, y=label)

    return Batch.from_data_list([graph() for _ in range(4)])


def convolutions(device: str) -> Iterator[tuple[str, Tensor]]:
    from torch_geometric.nn import global_mean_pool

    for name, make in _layers().items():
        torch.manual_seed(0)
        layer, generator = make().to(device), torch.Generator().manual_seed(7)
        optimizer = torch.optim.Adam(layer.parameters(), 0.01)
        for step in range(3):
            batch = _batch(generator).to(device)
            pooled = global_mean_pool(layer(batch.x, batch.edge_index), batch.batch)
            loss = F.cross_entropy(pooled[:, :3], batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield f"{name}, step {step}", loss.detach()


def pooling(device: str) -> Iterator[tuple[str, Tensor]]:
    from torch_geometric.nn import MedianAggregation, SAGPooling, SortAggregation, TopKPooling
    from torch_geometric.utils import k_hop_subgraph, softmax, to_dense_batch, to_undirected

    batch = _batch(torch.Generator().manual_seed(0)).to(device)
    for layer in (TopKPooling, SAGPooling):
        torch.manual_seed(0)
        found = layer(DIM, 0.5).to(device)(batch.x, batch.edge_index, batch=batch.batch)
        yield f"{layer.__name__}, nodes", found[0].detach()
        yield f"{layer.__name__}, edges", found[1]
    for aggregate in (MedianAggregation(), SortAggregation(3)):
        yield type(aggregate).__name__, aggregate.to(device)(batch.x, batch.batch)
    yield "softmax", softmax(batch.x[batch.edge_index[0]], batch.edge_index[1])
    yield "to_dense_batch", to_dense_batch(batch.x, batch.batch)[0]
    yield "to_undirected", to_undirected(batch.edge_index)
    yield "k_hop_subgraph", k_hop_subgraph(0, 2, batch.edge_index)[0]


def compiled(device: str) -> Iterator[tuple[str, Tensor]]:
    """``torch.compile`` with graph breaks and sizes that depend on values: self-loops."""
    from torch_geometric.nn import GATv2Conv, global_add_pool

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = GATv2Conv(DIM, 4, heads=2), nn.Linear(DIM, 3)

        def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
            return self.head(global_add_pool(self.attention(x, edges).relu(), batch, 4))

    torch.manual_seed(0)
    model, generator = Network().to(device), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    run = torch.compile(model, backend="tpu", dynamic=True) if device == "tpu" else model
    for step in range(5):
        batch = _batch(generator).to(device)
        loss = F.cross_entropy(run(batch.x, batch.edge_index, batch.batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"step {step}", loss.detach()

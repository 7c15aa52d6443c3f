"""Sparse gradients of embeddings and sparse adjacency: the losses of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, SparseAdam

from tpu_core.metrics import METRICS

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: SGD(p, 0.1),
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "SparseAdam": lambda p: SparseAdam(p, 0.05),
    "Adagrad": lambda p: Adagrad(p, 0.05),
}
TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(20, 4, padding_idx=3, sparse=True),
    "sum": lambda: nn.EmbeddingBag(20, 4, sparse=True, mode="sum"),
    "mean": lambda: nn.EmbeddingBag(20, 4, sparse=True, mode="mean"),
}


def train(table: str, optimizer: str, device: str) -> tuple[list[float], Tensor, Tensor]:
    torch.manual_seed(0)
    rows, head = TABLES[table]().to(device), nn.Linear(4, 1).to(device)
    steps = [OPTIMIZERS[optimizer](list(rows.parameters())), SGD(head.parameters(), 0.1)]
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        index = torch.randint(0, 20, (5 + step % 3, 3), generator=generator).to(device)
        for o in steps:
            o.zero_grad()
        # Used twice: gradients of a step are summed.
        loss = head(rows(index)).pow(2).mean() + rows(index).sin().mean()
        loss.backward()
        for o in steps:
            o.step()
        losses.append(loss.item())
    weight = next(rows.parameters())
    assert weight.grad is not None and weight.grad.is_sparse
    return losses, weight.detach().cpu(), weight.grad.to_dense().cpu()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
def test_embeddings(table: str, optimizer: str) -> None:
    found, expected = train(table, optimizer, "tpu"), train(table, optimizer, "cpu")
    for f, e in zip(found, expected, strict=True):
        # Rows of equal indices are summed in another order; five steps carry that on.
        torch.testing.assert_close(torch.as_tensor(f), torch.as_tensor(e), rtol=1e-5, atol=1e-5)


def test_a_step_of_sgd_waits_for_nothing() -> None:
    table = nn.Embedding(50, 8, sparse=True).to("tpu")
    step = SGD(table.parameters(), 0.1)
    index = torch.arange(7).to("tpu")
    METRICS.reset()
    table(index).pow(2).sum().backward()
    step.step()
    assert METRICS.snapshot()["host_syncs"] == 0


def test_graph_convolution() -> None:
    def run(device: str) -> tuple[Tensor, Tensor]:
        edges = torch.tensor([[0, 1, 2, 0, 3], [1, 2, 0, 0, 1]], device=device)
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(5, device=device), (4, 4))
        weight = torch.ones(5, 2, device=device).requires_grad_()
        x = torch.arange(20.0, device=device).reshape(4, 5) / 9 - 1
        h = torch.sparse.mm(adjacency, x @ weight).relu()
        loss = torch.sparse.mm(adjacency, h).pow(2).sum()
        loss.backward()
        assert weight.grad is not None
        return loss.detach().cpu(), weight.grad.cpu()

    for found, expected in zip(run("tpu"), run("cpu"), strict=True):
        torch.testing.assert_close(found, expected)

"""Compiled graphs within `torch.accelerator.Graph`."""

from __future__ import annotations

import pytest
import torch

from tpu_core.errors import GraphCaptureError

pytestmark = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch.accelerator.Graph is of torch 2.13"
)


def test_a_compiled_graph_that_writes_its_input():
    @torch.compile
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return (x * 2).relu()

    x, total = torch.ones(3).to("tpu"), torch.zeros(3).to("tpu")
    step(x, total)
    graph = torch.accelerator.Graph()
    with graph:
        y = step(x, total)
    for i in range(1, 4):
        x.copy_(torch.full((3,), float(i)))
        graph.replay()
        assert y.tolist() == [2 * i] * 3
    assert total.tolist() == [1 + 1 + 2 + 3] * 3


def test_random_ops_of_compiled_graphs_are_refused():
    """Each replay would have the numbers of the first."""
    dropout = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(32).to("tpu")
    dropout(x)
    with pytest.raises(GraphCaptureError, match="random op"), torch.accelerator.Graph():
        dropout(x)

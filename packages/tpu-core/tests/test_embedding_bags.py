"""``torch.nn.EmbeddingBag`` on the device: values and gradients as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

INDICES, OFFSETS = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 0]), torch.tensor([0, 4, 4, 7])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, -1.0, 0.25, 3.0, 1.5, 0.125, 1.0])


def run(device: str, weighted: bool, **options: Any) -> list[torch.Tensor]:
    """Result, gradient of the table, and of the weights."""
    torch.manual_seed(0)
    module = nn.EmbeddingBag(10, 3, **options).to(device)
    weights = WEIGHTS.to(device).requires_grad_() if weighted else None
    offsets = [*OFFSETS.tolist(), len(INDICES)] if options.get("include_last_offset") else OFFSETS
    bags = module(INDICES.to(device), torch.as_tensor(offsets).to(device), weights)
    (bags * torch.arange(1.0, 1 + bags.numel(), device=device).view_as(bags)).sum().backward()
    found = [bags.detach(), module.weight.grad, None if weights is None else weights.grad]
    return [x.cpu() for x in found if x is not None]


@pytest.mark.parametrize(
    ("weighted", "options"),
    [
        (False, {"mode": "mean", "padding_idx": 4}),
        (False, {"mode": "max"}),
        (False, {"mode": "max", "padding_idx": 4}),
        (False, {"mode": "mean", "include_last_offset": True}),
        (False, {"mode": "sum", "max_norm": 1.0}),
        (True, {"mode": "sum", "padding_idx": -6}),
    ],
)
def test_values_and_gradients(weighted: bool, options: dict[str, Any]) -> None:
    for got, want in zip(run("tpu", weighted, **options), run("cpu", weighted, **options)):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("every_tier")
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding_idx", [-1, 4])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("name", ["_embedding_bag", "_embedding_bag_forward_only"])
def test_what_is_kept_for_the_gradient(
    name: str, include_last_offset: bool, padding_idx: int, mode: int
) -> None:
    op = getattr(torch.ops.aten, name)
    table = torch.arange(30.0).view(10, 3)
    want, got = (
        op(
            *(x.to(d) for x in (table, INDICES, OFFSETS)),
            False,
            mode,
            False,
            None,
            include_last_offset,
            padding_idx,
        )
        for d in ("cpu", "tpu")
    )
    for w, g in zip(want, got, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g.cpu(), w)

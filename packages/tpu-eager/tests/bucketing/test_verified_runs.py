"""Programs on padded arrays judged by their ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu_core import modes
from tpu_core.metrics import METRICS


@pytest.fixture(autouse=True)
def fused(first_runs_judged: None) -> Iterator[None]:
    with modes.using("fused"):
        yield


def test_training_with_dropout_and_other_batches_passes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(384, 5),
    ).to("tpu")  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = METRICS.snapshot()
    for n in (6, 6, 5, 4, 3, 6):
        x, y = torch.randn(n, 3, 8, 8).to("tpu"), torch.randint(5, (n,)).to("tpu")
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.tpu.synchronize()
    made = METRICS.delta(before)
    assert made["verifications"] >= 2
    assert made["padded_executions"] >= 2

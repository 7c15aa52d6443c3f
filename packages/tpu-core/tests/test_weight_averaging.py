"""Averages of weights: `torch.optim.swa_utils` on the device, as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)


def averaged(device: str, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
    average = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = torch.randn(4, 5, 3).to(device)
    for inputs in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    state = [x.cpu().clone() for x in average.state_dict().values()]
    update_bn(batches, average)
    return [*state, average.eval()(batches[0]).detach().cpu()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_buffers": True},  # an integer among them, which foreach ops refuse
        {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"multi_avg_fn": get_swa_multi_avg_fn()},
    ],
    ids=["weights", "buffers", "exponential", "foreach"],
)
def test_averages_are_the_cpus(options: dict[str, Any]) -> None:
    torch.testing.assert_close(averaged("tpu", **options), averaged("cpu", **options))


def test_the_foreach_average_refuses_integers_as_the_cpus() -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="Integer division with addcdiv"):
            averaged(device, use_buffers=True, multi_avg_fn=get_swa_multi_avg_fn())

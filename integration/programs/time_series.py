"""Forecasts from series with gaps: masks, normalisation by what is known, quantile losses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

PAST, AHEAD, CHANNELS = 48, 12, 4
QUANTILES = (0.1, 0.5, 0.9)


class TCN(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.into = nn.Conv1d(2 * CHANNELS, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**i) for i in range(4))
        self.out = nn.Linear(width, AHEAD * CHANNELS * len(QUANTILES))

    def forward(self, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        count = known.sum(-1, keepdim=True).clamp(min=1)
        mean = (x * known).sum(-1, keepdim=True) / count
        spread = (((x - mean) * known).square().sum(-1, keepdim=True) / count + 1e-3).sqrt()
        scaled = ((x - mean) / spread).masked_fill(~known, 0.0)
        h = self.into(torch.cat([scaled, known.float()], dim=1))
        for i, layer in enumerate(self.layers):
            h = h + F.gelu(layer(F.pad(h, (2 * 2**i, 0))))
        y = self.out(h[..., -1]).view(-1, CHANNELS, AHEAD, len(QUANTILES))
        return y * spread[..., None] + mean[..., None]


def pinball(guess: torch.Tensor, y: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    q = torch.tensor(QUANTILES, device=y.device)
    error = y[..., None] - guess
    loss = torch.maximum(q * error, (q - 1) * error)
    return loss[known].mean()


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = TCN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10)
    while True:
        t = torch.arange(PAST + AHEAD) / 12 + torch.rand(24, CHANNELS, 1, generator=g) * 6
        series = t.sin() * (1 + torch.rand(24, CHANNELS, 1, generator=g))
        series = series + 0.1 * torch.randn(series.shape, generator=g)
        known = (torch.rand(series.shape, generator=g) < 0.8).to(device)
        series = series.to(device)
        series[~known] = torch.nan
        x, y = series.nan_to_num().split([PAST, AHEAD], -1)
        of_x, of_y = known.split([PAST, AHEAD], -1)
        guess = model(x, of_x)
        loss = pinball(guess, y, of_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        inside = ((y >= guess[..., 0]) & (y <= guess[..., 2]))[of_y].float().mean()
        yield loss.item() + inside.item()

"""Quantisation-aware training: rounding with straight-through gradients, observers, int8 check."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


class Rounded(torch.autograd.Function):
    """Quantised and dequantised; the gradient passes where nothing was clipped."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q = torch.round(x / scale)
        ctx.save_for_backward((q >= -128) & (q <= 127))
        return q.clamp(-128, 127) * scale

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None


class QuantLinear(nn.Linear):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            now = x.detach().abs().max()
            self.largest.copy_(torch.where(self.seen == 0, now, 0.9 * self.largest + 0.1 * now))
            self.seen += 1
        x = Rounded.apply(x, (self.largest / 127).clamp(min=1e-8))
        scales = self.weight.detach().abs().amax(1, keepdim=True) / 127
        return F.linear(x, Rounded.apply(self.weight, scales), self.bias)

    def as_int8(self) -> torch.Tensor:
        scales = self.weight.abs().amax(1, keepdim=True) / 127
        return torch.round(self.weight / scales).clamp(-128, 127).to(torch.int8)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(QuantLinear(64, 128), nn.ReLU(), QuantLinear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    teacher = torch.randn(64, 10, generator=g)
    step = 0
    while True:
        x = torch.randn(64, 64, generator=g)
        y = (x @ teacher).argmax(1).to(device)
        loss = F.cross_entropy(model(x.to(device)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                right = (model(x.to(device)).argmax(1) == y).float().mean()
                used = len(model[0].as_int8().unique())
            model.train()
            yield loss.item() + right.item() + used
        else:
            yield loss.item()

"""Blocks of the fuzzer ``programs`` over images: (batch, width, height, breadth)."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, Tensor]


class Conv2d(nn.Module):
    def __init__(self, width: int, kernel: int, dilation: int, groups: int, mode: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            *(width, width, kernel),
            padding=dilation * (kernel // 2),
            dilation=dilation,
            groups=groups,
            padding_mode=mode,
        )

    def forward(self, x: Tensor, data: Data) -> Tensor:
        return x + F.silu(self.conv(x))


class Norm2d(nn.Module):
    def __init__(self, width: int, how: str, affine: bool) -> None:
        super().__init__()
        self.norm: nn.Module = {
            "batch": lambda: nn.BatchNorm2d(width, affine=affine),
            "running": lambda: nn.BatchNorm2d(width, affine=affine, momentum=None),
            "group": lambda: nn.GroupNorm(2, width, affine=affine),
            "instance": lambda: nn.InstanceNorm2d(width, affine=affine),
        }[how]()

    def forward(self, x: Tensor, data: Data) -> Tensor:
        y: Tensor = self.norm(x)
        return y


class Resize(nn.Module):
    def __init__(self, width: int, how: str, mode: str, kernel: int) -> None:
        super().__init__()
        self.how, self.mode, self.kernel = how, mode, kernel
        self.up = nn.ConvTranspose2d(width, width, 2, 2) if how == "transposed" else None
        self.shuffle = nn.Conv2d(width, 4 * width, 1) if how == "shuffle" else None

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "up":
            return F.avg_pool2d(F.interpolate(x, scale_factor=2, mode=self.mode), 2)
        if self.how == "down":
            small = F.max_pool2d(x, 2, ceil_mode=True)
            return x + F.interpolate(small, size=x.shape[2:], mode=self.mode)
        if self.up is not None:
            return x + F.avg_pool2d(torch.tanh(self.up(x)), 2)
        if self.shuffle is not None:
            return x + F.avg_pool2d(F.pixel_shuffle(self.shuffle(x), 2), 2)
        if self.how == "adaptive":
            small = F.adaptive_avg_pool2d(x, (2, 1))
            return x + F.interpolate(small, size=x.shape[2:], mode="nearest")
        pool = F.max_pool2d if self.how == "max" else F.avg_pool2d
        return x + pool(x, self.kernel, 1, self.kernel // 2)


class Turn(nn.Module):
    def __init__(self, width: int, how: str, n: int, dims: list[int], mode: str) -> None:
        super().__init__()
        self.how, self.n, self.dims, self.mode = how, n, dims, mode

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "flip":
            return x + 0.5 * x.flip(self.dims)
        if self.how == "roll":
            return x + 0.5 * x.roll(self.n, self.dims[0])
        if self.how == "rot90":
            n = self.n if x.shape[2] == x.shape[3] else 2 * self.n
            return x + 0.5 * x.rot90(n, (2, 3))
        if self.how == "transpose" and x.shape[2] == x.shape[3]:
            return x + 0.5 * x.transpose(2, 3)
        if self.how == "crop":
            y = F.pad(x[:, :, 1:], (0, 0, 0, 1))
            return x + 0.5 * y
        return x + 0.5 * F.pad(x, (1, 1, 1, 0), self.mode)[:, :, :-1, 2:]


class Squeeze(nn.Module):
    """Channels scaled by what they hold."""

    def __init__(self, width: int, how: str, dims: list[int]) -> None:
        super().__init__()
        self.how, self.dims = how, dims
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "excite":
            return x * torch.sigmoid(self.mix(x.mean((2, 3))))[..., None, None]
        if self.how == "softmax":
            return x + x.flatten(2).softmax(-1).view_as(x)
        if self.how == "center":
            return x - x.mean(self.dims, keepdim=True)
        if self.how == "cumsum":
            return x + 0.1 * x.cumsum(self.dims[0])
        return x + self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def draw(r: random.Random, width: int) -> dict[str, Any]:
    """A block of the kinds above, as its class' name and parameters."""
    flag = r.random() < 0.5
    dims = r.choice([[2], [3], [2, 3], [1], [-1], [0], [1, 3]])
    drawn = {
        "Conv2d": lambda: {
            **{"kernel": r.choice([1, 3]), "dilation": 1, "groups": r.choice([1, 2, width])},
            "mode": r.choice(["zeros", "zeros", "reflect", "replicate", "circular"]),
        },
        "Norm2d": lambda: {
            "how": r.choice(["batch", "batch", "running", "group", "instance"]),
            "affine": flag,
        },
        "Resize": lambda: {
            "how": r.choice(["up", "down", "transposed", "shuffle", "adaptive", "max", "avg"]),
            "mode": r.choice(["nearest", "bilinear"]),
            "kernel": r.choice([1, 3]),
        },
        "Turn": lambda: {
            "how": r.choice(["flip", "roll", "rot90", "transpose", "crop", "pad"]),
            **{"n": r.choice([1, 2, 3]), "dims": dims},
            "mode": r.choice(["constant", "reflect", "replicate", "circular"]),
        },
        "Squeeze": lambda: {
            "how": r.choice(["excite", "softmax", "center", "cumsum", "mix"]),
            "dims": dims,
        },
    }
    kind = r.choice([*drawn])
    return {"kind": kind, **drawn[kind]()}

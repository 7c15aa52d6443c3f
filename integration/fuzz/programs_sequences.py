"""Blocks of the fuzzer ``programs`` over sequences: (batch, length, width) to the same shape.

``data`` has integers of the step: ``keys`` (batch, length), distinct in a row, and ``lengths``
(batch), of at least 1. Orders and masks follow from them, never from activations, where a rounding
would decide; a block that must look at activations is smooth but at ties.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, Tensor]


class Linear(nn.Module):
    def __init__(self, width: int, act: str, bias: bool) -> None:
        super().__init__()
        self.act, self.linear = act, nn.Linear(width, width, bias)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        return x + getattr(F, self.act)(self.linear(x))


class Norm(nn.Module):
    def __init__(self, width: int, how: str, affine: bool) -> None:
        super().__init__()
        self.how = how
        self.norm: nn.Module = {
            "layer": lambda: nn.LayerNorm(width, elementwise_affine=affine),
            "rms": lambda: nn.RMSNorm(width, elementwise_affine=affine),
            "group": lambda: nn.GroupNorm(2, width, affine=affine),
            "batch": lambda: nn.BatchNorm1d(width, affine=affine),
            "instance": lambda: nn.InstanceNorm1d(width, affine=affine, eps=0.1),
        }[how]()

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how in ("layer", "rms"):
            y: Tensor = self.norm(x)
            return y
        if self.how == "instance" and x.shape[1] == 1:  # PyTorch refuses one value
            return x
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Conv(nn.Module):
    def __init__(self, width: int, kernel: int, dilation: int, groups: int, mode: str) -> None:
        super().__init__()
        self.reach = dilation * (kernel - 1)
        self.mode = mode
        self.conv = nn.Conv1d(width, width, kernel, dilation=dilation, groups=groups)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        y = x.transpose(1, 2)
        mode = self.mode if self.reach < x.shape[1] else "constant"
        y = self.conv(F.pad(y, (self.reach - self.reach // 2, self.reach // 2), mode))
        return x + torch.tanh(y).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, masked: bool, how: str) -> None:
        super().__init__()
        self.heads, self.causal, self.masked, self.how = heads, causal, masked, how
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        b, n, d = x.shape
        q, k, v = (
            t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        places = torch.arange(n, device=x.device)
        mask = None
        if self.masked:
            mask = (places < data["lengths"][:, None])[:, None, None]
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=self.causal and mask is None
            )
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q, k) / (d // self.heads) ** 0.5
            if self.causal:
                scores = scores.masked_fill(places[:, None] < places, float("-inf"))
            elif mask is not None:
                scores = scores.masked_fill(~mask, -1e9)
            y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(b, n, d))


class Recurrent(nn.Module):
    def __init__(self, width: int, cell: str, layers: int, both: bool, first: bool) -> None:
        super().__init__()
        self.first = first
        self.rnn = getattr(nn, cell)(
            width, width // 2 if both else width, layers, batch_first=first, bidirectional=both
        )

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.first:
            return x + self.rnn(x)[0]
        return x + self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Gather(nn.Module):
    def __init__(self, width: int, how: str, down: bool) -> None:
        super().__init__()
        self.how, self.down = how, down

    def forward(self, x: Tensor, data: Data) -> Tensor:
        order = data["keys"].argsort(1, descending=self.down)
        if self.how == "gather":
            return x.gather(1, order[..., None].expand(x.shape)) + 0.5 * x
        if self.how == "index":
            return x[torch.arange(x.shape[0], device=x.device)[:, None], order] + 0.5 * x
        if self.how == "take":
            return x.take_along_dim(order[..., None], 1) + 0.5 * x
        return torch.zeros_like(x).scatter(1, order[..., None].expand(x.shape), x) + 0.5 * x


class Segments(nn.Module):
    """Means of groups of positions."""

    def __init__(self, width: int, groups: int, how: str) -> None:
        super().__init__()
        self.groups, self.how = groups, how

    def forward(self, x: Tensor, data: Data) -> Tensor:
        group = data["keys"] % self.groups
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        sums = x.new_zeros(x.shape[0], self.groups, x.shape[2])
        if self.how == "scatter":
            sums = sums.scatter_add(1, group[..., None].expand(x.shape), x)
        else:
            sums = sums.index_put((rows, group), x, accumulate=True)
        counts = F.one_hot(group, self.groups).sum(1).to(x.dtype).clamp(min=1)
        return x + (sums / counts[..., None])[rows, group]


class Sort(nn.Module):
    def __init__(self, width: int, how: str, dim: int, k: int) -> None:
        super().__init__()
        self.how, self.dim, self.k = how, dim, k

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "sort":
            return 0.5 * x + x.sort(self.dim)[0]
        if self.how == "topk":
            return x + x.topk(self.k, -1)[0].mean(-1, keepdim=True)
        if self.how == "cummax":
            return 0.5 * x + x.cummax(self.dim)[0]
        return x + x.median(-1, keepdim=True)[0]


class Mask(nn.Module):
    def __init__(self, width: int, how: str, diagonal: int) -> None:
        super().__init__()
        self.how, self.diagonal = how, diagonal

    def forward(self, x: Tensor, data: Data) -> Tensor:
        n = x.shape[1]
        valid = torch.arange(n, device=x.device) < data["lengths"][:, None]
        if self.how == "fill":
            return x.masked_fill(~valid[..., None], 0.0)
        if self.how == "where":
            return torch.where(valid[..., None], x, 0.5 * x)
        if self.how == "write":
            y = x.clone()
            y[:, n // 2 :] *= 0.5
            y[:, 0] = 0.25
            return y
        if self.how == "tril":
            weights = torch.ones(n, n, device=x.device).tril(self.diagonal)
            return x + weights @ x / (weights.sum(1)[:, None] + 1)
        return x * valid.to(x.dtype)[..., None] + x.mean()


class Cat(nn.Module):
    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.token = nn.Parameter(torch.linspace(-1, 1, width))
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "features":
            return x + self.mix(torch.cat([x, torch.tanh(x)], -1))
        if self.how == "stack":
            return torch.stack([x, x.flip(1), x * 2], 1).mean(1) + self.token
        first = self.token.expand(x.shape[0], 1, -1)
        return torch.cat([first, x], 1)[:, : x.shape[1]] + 0.5 * x


class Move(nn.Module):
    def __init__(self, width: int, how: str, n: int, dims: list[int], mode: str) -> None:
        super().__init__()
        self.how, self.n, self.dims, self.mode = how, n, dims, mode

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "flip":
            return x + x.flip(self.dims)
        if self.how == "roll":
            return x + 0.5 * x.roll(self.n, self.dims[0])
        if self.how == "pad":
            mode = self.mode if x.shape[1] > self.n else "constant"
            y = F.pad(x.transpose(1, 2), (self.n, 0), mode).transpose(1, 2)
            return x + 0.5 * y[:, : x.shape[1]]
        if self.how == "diff":
            return x + torch.diff(x, dim=1, prepend=x[:, :1])
        if self.how == "chunk":
            a, b = x.chunk(2, -1)
            return torch.cat([b, a], -1) + x
        return x.unfold(1, 1, 1).squeeze(-1) + x.repeat_interleave(2, 1)[:, ::2]


class Pool(nn.Module):
    def __init__(self, width: int, how: str, kernel: int, mode: str) -> None:
        super().__init__()
        self.how, self.kernel, self.mode = how, kernel, mode

    def forward(self, x: Tensor, data: Data) -> Tensor:
        y = x.transpose(1, 2)
        n = x.shape[1]
        if self.how == "avg":
            y = F.avg_pool1d(y, self.kernel, 1, self.kernel // 2, count_include_pad=False)
        elif self.how == "max":
            y = F.max_pool1d(y, self.kernel, 1, self.kernel // 2)
        elif self.how == "adaptive":
            y = F.adaptive_avg_pool1d(y, 1)
        else:
            y = F.interpolate(y, size=2 * n, mode=self.mode)[..., ::2]
        return x + 0.5 * y.transpose(1, 2)


class Reduce(nn.Module):
    def __init__(self, width: int, how: str, dims: list[int], power: int) -> None:
        super().__init__()
        self.how, self.dims, self.power = how, dims, power

    def forward(self, x: Tensor, data: Data) -> Tensor:
        dims, dim = self.dims, self.dims[0]
        if self.how in ("mean", "sum", "amax", "amin", "logsumexp"):
            y = getattr(x, self.how)(dims, keepdim=True)
            return x - (y / 8 if self.how == "sum" else y)
        if self.how == "std":
            return x / (x.var(dims, correction=0, keepdim=True) + 1).sqrt()
        if self.how == "softmax":
            return x + x.softmax(dim)
        if self.how == "log_softmax":
            return x + 0.1 * x.log_softmax(dim)
        if self.how == "cumsum":
            places = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
            return x + x.cumsum(1) / places[:, None]
        if self.how == "power":
            return x + 0.1 * torch.tanh(x) ** self.power
        if self.how == "prod":
            return x + torch.tanh(x).prod(-1, keepdim=True)
        return x / (torch.linalg.vector_norm(x, self.power, dim, keepdim=True) + 1)


class Outer(nn.Module):
    def __init__(self, width: int, how: str, causal: bool) -> None:
        super().__init__()
        self.how, self.causal = how, causal

    def forward(self, x: Tensor, data: Data) -> Tensor:
        if self.how == "features":
            return x + torch.einsum("bld,ble,bme->bmd", x, x, x) / (8 * x.shape[1])
        near = torch.einsum("bld,bmd->blm", x, x).tanh() / x.shape[1]
        if self.causal:
            near = near.tril()
        return x + near.bmm(x)


class Buckets(nn.Module):
    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(rows, width)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        edges = torch.arange(1, self.rows, device=x.device) * 3
        return x + self.table(torch.bucketize(data["keys"], edges))


REDUCTIONS = (
    *("mean", "sum", "amax", "amin", "logsumexp", "std", "softmax", "log_softmax", "cumsum"),
    *("power", "prod", "norm"),
)


def draw(r: random.Random, width: int) -> dict[str, Any]:
    """A block of the kinds above, as its class' name and parameters."""
    flag, dims = r.random() < 0.5, r.choice([[1], [2], [1, 2], [0], [-1], [0, 1]])
    one_dim = r.choice([1, 2, -1])
    drawn = {
        "Linear": lambda: {"act": r.choice(["relu", "gelu", "silu", "tanh", "elu"]), "bias": flag},
        "Norm": lambda: {
            "how": r.choice(["layer", "rms", "group", "batch", "instance"]),
            "affine": flag,
        },
        "Conv": lambda: {
            **{"kernel": r.choice([1, 2, 3, 5]), "dilation": r.choice([1, 2])},
            **{"groups": r.choice([1, 2, width])},
            "mode": r.choice(["constant", "replicate", "reflect", "circular"]),
        },
        "Attention": lambda: {
            **{"heads": r.choice([1, 2]), "causal": flag, "masked": r.random() < 0.5},
            "how": r.choice(["sdpa", "einsum"]),
        },
        "Recurrent": lambda: {
            **{"cell": r.choice(["LSTM", "GRU", "RNN"]), "layers": r.choice([1, 1, 2])},
            **{"both": flag, "first": r.random() < 0.7},
        },
        "Gather": lambda: {"how": r.choice(["gather", "index", "take", "scatter"]), "down": flag},
        "Segments": lambda: {
            "groups": r.choice([1, 2, 3, 5]),
            "how": r.choice(["scatter", "index_put"]),
        },
        "Sort": lambda: {
            **{"how": r.choice(["sort", "topk", "cummax", "median"]), "dim": one_dim},
            "k": r.randint(1, width),
        },
        "Mask": lambda: {
            "how": r.choice(["fill", "where", "write", "tril", "mean"]),
            "diagonal": r.choice([-1, 0, 1]),
        },
        "Cat": lambda: {"how": r.choice(["features", "stack", "token"])},
        "Move": lambda: {
            **{"how": r.choice(["flip", "roll", "pad", "diff", "chunk", "windows"])},
            **{"n": r.choice([1, 2, 3]), "dims": dims},
            "mode": r.choice(["constant", "replicate", "reflect"]),
        },
        "Pool": lambda: {
            **{"how": r.choice(["avg", "max", "adaptive", "resize"]), "kernel": r.choice([1, 3])},
            "mode": r.choice(["nearest", "linear"]),
        },
        "Reduce": lambda: {
            "how": r.choice(REDUCTIONS),
            "dims": dims,
            "power": r.choice([1, 2, 3, 4]),
        },
        "Outer": lambda: {"how": r.choice(["features", "places"]), "causal": flag},
        "Buckets": lambda: {"rows": r.choice([2, 5, 9])},
    }
    kind = r.choice([*drawn])
    return {"kind": kind, **drawn[kind]()}

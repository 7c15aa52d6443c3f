"""Ops of the fuzzer ``xla`` that move elements, reduce them, or scan them."""

from __future__ import annotations

import random
from typing import Any

from .xla_ops import (
    MOST_ELEMENTS,
    Drawn,
    Pool,
    Tensor,
    a_dim,
    anything,
    choice,
    flag,
    floating,
    inexact,
    integral,
    number,
    one,
    op,
    operand,
    real,
    shaped,
    some_dims,
)

# --- moves ----------------------------------------------------------------------------------------


def shapes_of(r: random.Random, x: Tensor) -> list[int]:
    """A shape of as many elements: dims merged, split, ones put in."""
    dims = list(x.shape)
    for _ in range(r.randint(1, 3)):
        i = r.randrange(len(dims) + 1)
        if i + 1 < len(dims) and r.random() < 0.6:
            dims[i : i + 2] = [dims[i] * dims[i + 1]]
        elif i < len(dims) and r.random() < 0.6:
            parts = [k for k in (2, 3, 4, 5, 8) if dims[i] and dims[i] % k == 0]
            if parts:
                k = r.choice(parts)
                dims[i : i + 1] = [k, dims[i] // k] if r.random() < 0.5 else [dims[i] // k, k]
        elif len(dims) < 8:
            dims.insert(i, 1)
    return dims


def permutation(r: random.Random, x: Tensor) -> list[int]:
    return r.sample(range(x.dim()), x.dim())


def expanded(r: random.Random, x: Tensor) -> list[int]:
    sizes = [r.choice([2, 3, 7]) if n == 1 and r.random() < 0.7 else n for n in x.shape]
    if len(sizes) < 8 and r.random() < 0.5:
        sizes.insert(0, r.choice([1, 2, 3, 5]))
    return sizes if _elements(sizes) <= MOST_ELEMENTS else list(x.shape)


def repeats(r: random.Random, x: Tensor) -> list[int]:
    times = [r.choice([1, 1, 2, 3]) for _ in x.shape]
    return times if x.numel() * _elements(times) <= MOST_ELEMENTS else [1] * x.dim()


def _elements(sizes: list[int]) -> int:
    n = 1
    for size in sizes:
        n *= size
    return n


def moved(name: str, code: str, least: int = 1, accept: Any = anything, **params: Any) -> None:
    op(name, "moves", code, one(shaped(accept, least), **params))


op("reshape", "moves", "a.reshape(shape)", one(anything, shape=shapes_of))
op("expand", "moves", "a.expand(shape)", one(anything, shape=expanded))
op(
    "unsqueeze",
    "moves",
    "a.unsqueeze(dim)",
    one(shaped(anything, 0, 7), dim=lambda r, x: r.randint(0, x.dim())),
)
op("squeeze", "moves", "a.squeeze()", one(anything))
moved("permute", "a.permute(dims)", dims=permutation)
moved("transpose", "a.transpose(d, e)", d=a_dim, e=a_dim)
moved("repeat", "a.repeat(times)", times=repeats)
moved("flip", "a.flip(dims)", dims=some_dims)
moved("roll", "a.roll(n, dim)", n=lambda r, x: r.randint(-9, 9), dim=a_dim)
moved("rot90", "a.rot90(n, [-1, -2])", 2, n=choice(1, 2, 3, -1))
moved("tril", "a.tril(n)", 2, n=choice(-2, -1, 0, 1, 3))
moved("triu", "a.triu(n)", 2, n=choice(-2, -1, 0, 1, 3))
moved("diagonal", "a.diagonal(n, -2, -1)", 2, n=choice(-1, 0, 0, 1))
moved("chunk", "a.chunk(n, dim)[-1]", n=choice(1, 2, 3), dim=a_dim)
op(
    "diag_embed",
    "moves",
    "a.diag_embed(n)",
    one(
        lambda x: 0 < x.dim() < 7 and x.numel() * (x.shape[-1] + 2) < MOST_ELEMENTS,
        n=choice(-1, 0, 2),
    ),
)
op(
    "repeat_interleave",
    "moves",
    "a.repeat_interleave(n, dim)",
    one(lambda x: 0 < x.dim() and x.numel() < MOST_ELEMENTS // 3, n=choice(1, 2, 3), dim=a_dim),
)


def _slice(p: Pool) -> Drawn:
    i = p.pick(shaped(anything))
    if i is None:
        return None
    dim = a_dim(p.r, p.value(i))
    size = p.value(i).shape[dim]
    start = p.r.randrange(size)
    return [i], {
        "dim": dim,
        "start": start,
        "stop": p.r.randint(start + 1, size),
        "step": p.r.choice([1, 1, 2, 3]),
    }


op("slice", "moves", "torch.ops.aten.slice(a, dim, start, stop, step)", _slice)
op("select", "moves", "a.select(dim, n)", one(shaped(anything), dim=a_dim, n=choice(0, -1)))


def _unfold(p: Pool) -> Drawn:
    i = p.pick(shaped(anything, 1, 7))
    if i is None:
        return None
    dim = a_dim(p.r, p.value(i))
    size = p.r.randint(1, min(4, p.value(i).shape[dim]))
    return [i], {"dim": dim, "size": size, "step": p.r.choice([1, 1, 2, 3])}


op("unfold", "moves", "a.unfold(dim, size, step)", _unfold)


def _cat(p: Pool) -> Drawn:
    i = p.pick(shaped(anything))
    if i is None:
        return None
    x = p.value(i)
    dim = p.r.randrange(x.dim())
    shape = list(x.shape)
    shape[dim] = p.r.choice([1, 2, shape[dim], 5])
    if _elements(shape) > MOST_ELEMENTS:
        return None
    ins = [i, p.new(shape, x.dtype), p.r.choice([i, p.new(shape, x.dtype)])]
    p.r.shuffle(ins)
    return ins, {"dim": dim}


op("cat", "moves", "torch.cat([a, b, c], dim)", _cat)
op(
    "stack",
    "moves",
    "torch.stack([a, a.flip(0), a], dim)",
    one(shaped(anything, 1, 7), dim=lambda r, x: r.randint(0, x.dim())),
)


def pads(r: random.Random, x: Tensor) -> list[int]:
    widths = []
    for n in reversed(x.shape[-r.randint(1, x.dim()) :]):
        widths += [r.choice([0, 1, 2, 3]), r.choice([0, 1, 2, -1 if n > 1 else 0])]
    return widths


moved("pad", "F.pad(a, widths, 'constant', n)", 1, number, widths=pads, n=choice(0, 1, -2))


def _pad_mode(p: Pool) -> Drawn:
    i = p.pick(shaped(inexact, 2, 5))
    if i is None:
        return None
    x = p.value(i)
    n = min(x.dim() - 1 if x.dim() < 4 else x.dim() - 2, p.r.choice([1, 1, 2, 3]))
    widths = []
    for size in reversed(x.shape[-n:]):
        widths += [p.r.randint(0, min(3, size - 1)), p.r.randint(0, min(3, size - 1))]
    return [i], {"widths": widths, "mode": p.r.choice(["reflect", "replicate", "circular"])}


op("pad_mode", "moves", "F.pad(a, widths, mode)", _pad_mode)

# --- reductions -----------------------------------------------------------------------------------


def reduced(
    name: str, kind: str, accept: Any, code: str = "", bound: str = "", **params: Any
) -> None:
    code = code or f"a.{name}(dims, keepdim=keepdim)"
    op(name, kind, code, one(shaped(accept), **params, dims=some_dims, keepdim=flag), bound=bound)


def along(
    name: str, kind: str, accept: Any, code: str, bound: str = "", least: int = 1, **more: Any
) -> None:
    op(name, kind, code, one(shaped(accept, least), dim=a_dim), bound=bound, **more)


reduced("sum", "sums", anything)
reduced("nansum", "sums", real)
reduced("amax", "moves", real)
reduced("amin", "moves", real)
reduced("mean", "smooth", inexact)
reduced("var", "smooth", floating, "a.var(dims, correction=n, keepdim=keepdim)", n=choice(0, 0))
reduced(
    "std", "smooth", floating, "((a - 0.5).var(dims, correction=0, keepdim=keepdim) + 1).sqrt()"
)
reduced("logsumexp", "smooth", floating)
reduced("norm2", "smooth", floating, "(torch.linalg.vector_norm(a, 2, dims, keepdim) + 1)")
reduced("norm1", "sums", real, "a.abs().sum(dims, keepdim=keepdim)")
reduced("any", "steps", anything)
reduced("all", "steps", anything)
op("count_nonzero", "steps", "a.count_nonzero(dims)", one(shaped(anything), dims=some_dims))
op("sum_all", "sums", "a.sum()", one(anything))
op("sum_of_products", "sums", "(a * a.flip(0)).sum(dims)", one(shaped(number), dims=some_dims))


def _reduced_pair(p: Pool) -> Drawn:
    i = p.pick(shaped(number))
    if i is None:
        return None
    j = operand(p, i)
    rank = max(p.value(i).dim(), p.value(j).dim())
    dims = sorted(p.r.sample(range(rank), p.r.randint(1, rank)))
    return [i, j], {"dims": dims, "keepdim": p.r.random() < 0.5}


op("product_sum", "sums", "(a * b).sum(dims, keepdim=keepdim)", _reduced_pair)
op(
    "squared_distance",
    "sums",
    "((a - b) ** 2).sum(dims, keepdim=keepdim)",
    _reduced_pair,
    bound="((a + b) ** 2).sum(dims, keepdim=keepdim)",
)
op("equal_count", "steps", "(a == b).sum(dims, keepdim=keepdim)", _reduced_pair)
op("sum_to", "sums", "a.sum(dims, dtype=torch.float64)", one(shaped(real), dims=some_dims))
along("prod", "sums", lambda x: number(x) and max(x.shape) < 64, "a.prod(dim)")
along("cumsum", "sums", anything, "a.cumsum(dim)")
along("cumprod", "sums", lambda x: number(x) and max(x.shape) < 64, "a.cumprod(dim)")
along("cummax", "steps", real, "a.cummax(dim)[0]")
along("cummin", "steps", real, "a.cummin(dim)[0]")
along("logcumsumexp", "smooth", floating, "a.logcumsumexp(dim)", most=50.0)
along("softmax", "smooth", floating, "a.softmax(dim)")
along("log_softmax", "smooth", floating, "a.log_softmax(dim)")
along("diff", "sums", number, "a.diff(dim=dim)", bound="a.abs() * 2")
along("argmax", "steps", real, "a.argmax(dim)")
along("argmin", "steps", real, "a.argmin(dim)")
along("max_values", "moves", real, "a.max(dim)[0]")
along("min_values", "moves", real, "a.min(dim)[0]")
along("aminmax", "moves", real, "a.aminmax(dim=dim)[1]")
op(
    "bincount_like",
    "sums",
    "(a.unsqueeze(0) == torch.arange(3, device=a.device).reshape([3] + [1] * a.dim())).sum(dims)",
    one(shaped(integral, 1, 7), dims=some_dims),
)

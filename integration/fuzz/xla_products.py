"""Ops of the fuzzer ``xla`` that contract: products of matrices, convolutions, windows, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .xla_ops import (
    MOST_ELEMENTS,
    Draw,
    Drawn,
    Pool,
    Tensor,
    choice,
    floating,
    inexact,
    number,
    one,
    op,
    shaped,
)

MOST_PRODUCTS = 1 << 25
WIDTHS = (1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64)


def multiplied(x: Tensor) -> bool:
    """Of a type whose products the CPU knows, with a dim to contract."""
    return number(x) and x.dim() > 0 and x.numel() > 0


def affordable(x: Tensor, others: int) -> bool:
    return (
        x.numel() * others <= MOST_PRODUCTS and x.numel() // x.shape[-1] * others <= MOST_ELEMENTS
    )


def _factor(
    p: Pool, accept: Callable[[Tensor], bool], transposed: bool = False
) -> tuple[int, Tensor, int] | None:
    """A value of the pool, by its index, and the width of a matrix to multiply it with."""
    i = p.pick(accept)
    if i is None:
        return None
    x, n = p.value(i), p.r.choice(WIDTHS)
    return (i, x, n) if affordable(x.mT if transposed else x, n) else None


def _matmul(p: Pool) -> Drawn:
    found = _factor(p, multiplied)
    if found is None:
        return None
    i, x, n = found
    batch = [1 if p.r.random() < 0.3 else m for m in x.shape[:-2]]
    batch = batch[p.r.randint(0, len(batch)) :] if p.r.random() < 0.5 else batch
    shape = [*batch, x.shape[-1], n]
    if p.r.random() < 0.15:
        shape = [x.shape[-1]]
    return [i, p.new(shape, x.dtype)], {}


def _matmul_left(p: Pool) -> Drawn:
    found = _factor(p, lambda x: multiplied(x) and x.dim() > 1, transposed=True)
    if found is None:
        return None
    i, x, n = found
    batch = [1 if p.r.random() < 0.3 else m for m in x.shape[:-2]]
    return [i, p.new([*batch, n, x.shape[-2]], x.dtype)], {}


def _linear(p: Pool) -> Drawn:
    found = _factor(p, lambda x: multiplied(x) and inexact(x))
    if found is None:
        return None
    i, x, n = found
    return [i, p.new([n, x.shape[-1]], x.dtype), p.new([n], x.dtype)], {}


def _tensordot(p: Pool) -> Drawn:
    i = p.pick(lambda x: multiplied(x) and x.dim() <= 6)
    if i is None:
        return None
    x = p.value(i)
    dims = p.r.sample(range(x.dim()), p.r.randint(1, min(3, x.dim())))
    shape = [x.shape[d] for d in dims]
    order = p.r.sample(range(len(dims)), len(dims))
    free = [p.r.choice([1, 2, 3])] if p.r.random() < 0.7 else []
    if torch.Size(shape).numel() > 1 << 16 or x.numel() * sum(free) > MOST_PRODUCTS:
        return None
    y = p.new([*(shape[k] for k in order), *free], x.dtype)
    return [i, y], {"dims": [[dims[k] for k in order], list(range(len(dims)))]}


def _einsum(p: Pool) -> Drawn:
    i = p.pick(lambda x: multiplied(x) and 1 <= x.dim() <= 5)
    if i is None:
        return None
    x = p.value(i)
    letters = "abcde"[: x.dim()]
    kept = [c for c in letters if p.r.random() < 0.6]
    other = [c for c in letters if p.r.random() < 0.6]
    p.r.shuffle(other)
    shape = [x.shape[letters.index(c)] for c in other]
    result = list(kept)
    size = torch.Size(shape).numel()
    if p.r.random() < 0.5 and x.numel() * 3 < MOST_PRODUCTS:
        other.append("z")
        shape.append(3)
        result.append("z")
    p.r.shuffle(result)
    if size > 1 << 18 or x.numel() > 1 << 19:
        return None
    form = f"{letters},{''.join(other)}->{''.join(result)}"
    return [i, p.new(shape, x.dtype)], {"form": form}


op("matmul", "sums", "torch.matmul(a, b)", _matmul)
op("matmul_left", "sums", "torch.matmul(b, a)", _matmul_left)
op(
    "matmul_transposed",
    "sums",
    "torch.matmul(a.transpose(-1, -2), b.transpose(-1, -2)).transpose(-1, -2)",
    _matmul_left,
)
op("linear", "sums", "F.linear(a, b, c)", _linear)
op("tensordot", "sums", "torch.tensordot(a, b, dims)", _tensordot)
op("einsum", "sums", "torch.einsum(form, a, b)", _einsum)
op(
    "vmap_squared_rows",
    "sums",
    "torch.vmap(lambda r: ((b @ r) ** 2).sum())(a)",
    lambda p: _rows(p),
)
op("vmap_products", "sums", "torch.vmap(lambda r: (b * r).sum(0))(a)", lambda p: _rows(p))
op(
    "gram",
    "sums",
    "a @ a.mT",
    one(lambda x: multiplied(x) and x.dim() > 1 and x.shape[-2] <= 64 and x.numel() <= 1 << 18),
)


def _rows(p: Pool) -> Drawn:
    i = p.pick(lambda x: multiplied(x) and x.dim() == 2 and x.shape[1] <= 16)
    if i is None:
        i = p.new([p.r.choice([1, 5, 129, 1025, 32769]), p.r.choice([1, 2, 3, 8])], torch.float32)
    n = p.value(i).shape[1]
    return [i, p.new([n, n], p.value(i).dtype)], {}


# --- convolutions ---------------------------------------------------------------------------------


def _convolution(transposed: bool):
    def draw(p: Pool) -> Drawn:
        rank = p.r.choice([1, 1, 2, 2, 3])
        groups = p.r.choice([1, 1, 1, 2, 3])
        each, out = p.r.choice([1, 2, 3, 4]), p.r.choice([1, 2, 3, 5]) * groups
        i = p.pick(
            lambda x: (
                floating(x)
                and x.dim() == rank + 2
                and x.numel() > 0
                and x.shape[1] % groups == 0
                and x.numel() * out * 27 <= 1 << 24
            )
        )
        if i is None or p.r.random() < 0.3:
            sizes = [p.r.choice([3, 4, 5, 7, 8, 9, 16 if rank < 3 else 3]) for _ in range(rank)]
            dtype = p.r.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
            i = p.new([p.r.choice([1, 2, 3, 8]), groups * each, *sizes], dtype)
        x = p.value(i)
        each = x.shape[1] // groups
        kernel = [p.r.choice([1, 2, 3]) for _ in range(rank)]
        params = {
            "stride": [p.r.choice([1, 1, 2, 3]) for _ in range(rank)],
            "padding": [p.r.choice([0, 0, 1, 2]) for _ in range(rank)],
            "dilation": [p.r.choice([1, 1, 2]) for _ in range(rank)],
            "groups": groups,
        }
        if transposed:
            params["extra"] = [0] * rank
            w = p.new([x.shape[1], out // groups, *kernel], x.dtype)
        else:
            w = p.new([out, each, *kernel], x.dtype)
        return [i, w, p.new([out], x.dtype)], params

    return draw


op(
    "convolution",
    "sums",
    "torch.convolution(a, b, c, stride, padding, dilation, False, [0] * len(stride), groups)",
    _convolution(False),
)
op(
    "convolution_transposed",
    "sums",
    "torch.convolution(a, b, c, stride, padding, dilation, True, extra, groups)",
    _convolution(True),
)


def images(x: Tensor) -> bool:
    return floating(x) and x.dim() == 4 and x.numel() > 0 and min(x.shape[2:]) > 1


def an_image(least: int, most: int, **params: Any) -> Draw:
    """An image of the pool, else a new one; parameters drawn for it."""

    def draw(p: Pool) -> Drawn:
        i = p.pick(lambda x: images(x) and x.numel() <= most)
        if i is None:
            sizes = [p.r.choice([1, 2, 3]), p.r.choice([1, 2, 4])]
            sizes += [p.r.randint(least, 9), p.r.randint(least, 9)]
            i = p.new(sizes, p.r.choice([torch.float32, torch.float32, torch.bfloat16]))
        return [i], {k: f(p.r) for k, f in params.items()}

    return draw


def lines(x: Tensor) -> bool:
    return floating(x) and x.dim() in (2, 3) and x.numel() > 0 and x.shape[-1] > 1


op(
    "max_pool2d",
    "moves",
    "F.max_pool2d(a, n, m)",
    an_image(2, 1 << 20, n=choice(1, 2), m=choice(1, 2, 3)),
)
op(
    "avg_pool2d",
    "smooth",
    "F.avg_pool2d(a, n, m)",
    an_image(2, 1 << 20, n=choice(1, 2), m=choice(1, 2, 3)),
)
op("max_pool1d", "moves", "F.max_pool1d(a, n, m)", one(lines, n=choice(1, 2), m=choice(1, 2, 3)))
op("avg_pool1d", "smooth", "F.avg_pool1d(a, n, m)", one(lines, n=choice(1, 2), m=choice(1, 2, 3)))
op(
    "adaptive_avg_pool2d",
    "smooth",
    "F.adaptive_avg_pool2d(a, n)",
    an_image(2, 1 << 20, n=choice(1, 2, 3)),
)
op(
    "adaptive_max_pool2d",
    "moves",
    "F.adaptive_max_pool2d(a, n)",
    an_image(2, 1 << 20, n=choice(1, 2, 3)),
)
op(
    "upsample_nearest",
    "moves",
    "F.interpolate(a, scale_factor=n)",
    an_image(2, 1 << 17, n=choice(1, 2, 3)),
)
op(
    "upsample_bilinear",
    "smooth",
    "F.interpolate(a, size=[n, m], mode='bilinear', align_corners=corners)",
    an_image(
        2,
        1 << 16,
        n=choice(3, 4, 7),
        m=choice(2, 5, 8),
        corners=choice(True, False),
    ),
)
op("layer_norm", "smooth", "F.layer_norm(a, a.shape[-1:], eps=0.1)", one(shaped(floating)))
op("rms_norm", "smooth", "F.rms_norm(a, a.shape[-1:], eps=0.1)", one(shaped(floating)))
op(
    "group_norm",
    "smooth",
    "F.group_norm(a, n, eps=0.1)",
    one(
        lambda x: floating(x) and 2 <= x.dim() <= 5 and x.numel() > 2 and x.shape[1] % 2 == 0,
        n=choice(1, 2),
    ),
)
op(
    "batch_norm",
    "smooth",
    "F.batch_norm(a, None, None, training=True, eps=0.1)",
    one(lambda x: floating(x) and 2 <= x.dim() <= 5 and x.numel() > x.shape[1] > 0),
)
op("normalize", "smooth", "F.normalize(a + 0.5, dim=-1)", one(shaped(floating)))
op(
    "cdist",
    "smooth",
    "(torch.cdist(a, a, p=n) + 1)",
    one(
        lambda x: (
            x.dtype in (torch.float32, torch.float64) and x.dim() == 2 and 0 < x.numel() < 2000
        ),
        n=choice(1.0, 3.0),
    ),
)

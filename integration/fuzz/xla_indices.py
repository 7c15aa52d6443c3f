"""Ops of the fuzzer ``xla`` with indices: gathers, scatters, sorts, searches."""

from __future__ import annotations

import torch

from .xla_ops import (
    Drawn,
    Pool,
    a_dim,
    anything,
    choice,
    flag,
    floating,
    inexact,
    integer,
    number,
    one,
    op,
    real,
    shaped,
)


def _along(p: Pool, accept=anything):
    i = p.pick(shaped(accept))
    if i is None:
        return None
    return i, p.value(i), p.r.randrange(p.value(i).dim())


def _index_select(p: Pool) -> Drawn:
    if (found := _along(p)) is None:
        return None
    i, x, dim = found
    index = p.new([p.r.choice([0, 1, 2, 5, x.shape[dim]])], torch.int64, 0, x.shape[dim] - 1)
    return [i, index], {"dim": dim}


def _gather(p: Pool) -> Drawn:
    if (found := _along(p)) is None:
        return None
    i, x, dim = found
    shape = [p.r.choice([n, n, max(n // 2, 1)]) for n in x.shape]
    shape[dim] = p.r.choice([1, 3, x.shape[dim]])
    return [i, p.new(shape, torch.int64, 0, x.shape[dim] - 1)], {"dim": dim}


def _scatter(accept=number, dtype=torch.int64):
    def draw(p: Pool) -> Drawn:
        if (found := _along(p, accept)) is None:
            return None
        i, x, dim = found
        shape = [p.r.choice([n, n, max(n // 2, 1)]) for n in x.shape]
        shape[dim] = p.r.choice([1, 3, x.shape[dim]])
        index = p.new(shape, dtype, 0, x.shape[dim] - 1)
        return [i, index, p.new(shape, x.dtype)], {"dim": dim}

    return draw


def _index_add(p: Pool) -> Drawn:
    if (found := _along(p, number)) is None:
        return None
    i, x, dim = found
    shape = list(x.shape)
    shape[dim] = p.r.choice([1, 2, 7, x.shape[dim]])
    if torch.Size(shape).numel() > 1 << 20:
        return None
    index = p.new([shape[dim]], torch.int64, 0, x.shape[dim] - 1)
    return [i, index, p.new(shape, x.dtype)], {"dim": dim}


def _index_of(p: Pool) -> Drawn:
    """Two indices that broadcast, for neighbouring dims."""
    i = p.pick(shaped(anything, 2, 5))
    if i is None:
        return None
    x = p.value(i)
    shape = [p.r.choice([1, 2, 3, 5])] * p.r.choice([1, 1, 2])
    other = shape if p.r.random() < 0.7 else shape[-1:]
    indices = [p.new(s, torch.int64, -n, n - 1) for s, n in zip((shape, other), x.shape)]
    return [i, *indices], {}


def _index_put(p: Pool) -> Drawn:
    if (drawn := _index_of(p)) is None or not number(p.value(drawn[0][0])):
        return None
    x, index = p.value(drawn[0][0]), p.value(drawn[0][1])
    return [*drawn[0], p.new([*index.shape, *x.shape[2:]], x.dtype)], {}


def _embedding(p: Pool) -> Drawn:
    rows, width = p.r.choice([1, 3, 17, 200]), p.r.choice([1, 4, 7])
    i = p.pick(lambda x: inexact(x) and x.dim() == 2 and x.numel() > 0)
    if i is None:
        i = p.new([rows, width], torch.float32)
    shape = [p.r.choice([1, 2, 5, 33]) for _ in range(p.r.choice([1, 2, 3]))]
    return [i, p.new(shape, p.r.choice([torch.int64, torch.int32]), 0, p.value(i).shape[0] - 1)], {}


def _search(p: Pool) -> Drawn:
    i = p.pick(shaped(real, 1, 3))
    if i is None:
        return None
    n = p.r.choice([1, 2, 7, 64, 129, 300])
    return [i, p.new([n], p.value(i).dtype)], {"right": p.r.random() < 0.5}


op("index_select", "moves", "a.index_select(dim, b)", _index_select, raw="b")
op("gather", "moves", "a.gather(dim, b)", _gather, raw="b")
op("index_pair", "moves", "a[b, c]", _index_of, raw="bc")
op("index_second", "moves", "a[:, c.clamp(-a.shape[1], a.shape[1] - 1)]", _index_of, raw="bc")
op("embedding", "moves", "F.embedding(b, a)", _embedding, raw="b")
op("scatter_add", "sums", "a.scatter_add(dim, b, c)", _scatter(), raw="b")
op("scatter_constant", "moves", "a.scatter(dim, b, 2)", _scatter(), raw="b")
for how, kind in {"sum": "sums", "prod": "sums", "amax": "moves", "amin": "moves"}.items():
    code = f"a.scatter_reduce(dim, b, c, '{how}', include_self=%s)"
    accept = number if kind == "sums" else real
    op(f"scatter_{how}", kind, code % True, _scatter(accept), raw="b")
    op(f"scatter_{how}_alone", kind, code % False, _scatter(accept), raw="b")
op("index_add", "sums", "a.index_add(dim, b, c)", _index_add, raw="b")
op("index_fill", "moves", "a.index_fill(dim, b, 1)", _index_select, raw="b")
op("index_put", "sums", "a.index_put((b, c), d, accumulate=True)", _index_put, raw="bc")
op("take", "moves", "a.take(b % a.numel())", _embedding, raw="b")
op(
    "one_hot",
    "steps",
    "F.one_hot(a & 3, n)",
    one(lambda x: x.dtype == torch.int64 and x.dim() < 7 and x.numel() < 1 << 17, n=choice(4, 7)),
)

sizes = {"dim": a_dim, "down": flag}
op("sort_values", "moves", "a.sort(dim, down)[0]", one(shaped(anything), **sizes))
op(
    "sort_stable",
    "steps",
    "a.sort(dim=dim, descending=down, stable=True)[1]",
    one(shaped(real), **sizes),
)
op(
    "argsort",
    "steps",
    "a.argsort(dim=dim, descending=down, stable=True)",
    one(shaped(real), **sizes),
)
op("median", "moves", "a.median(dim)[0]", one(shaped(real), dim=a_dim))
op("nanmedian", "moves", "a.nanmedian(dim)[0]", one(shaped(real), dim=a_dim))
op("searchsorted", "steps", "torch.searchsorted(b.sort()[0], a, right=right)", _search)
op("bucketize", "steps", "torch.bucketize(a, b.sort()[0], right=right)", _search)
op("isin", "steps", "torch.isin(a, b)", _search)
op("unique_count", "steps", "a.flatten().sort()[0].diff().ne(0).sum()", one(shaped(real)))
op(
    "histogram",
    "sums",
    "a.new_zeros(5).index_add(0, b.flatten() & 3, torch.ones_like(b.flatten()).to(a.dtype))",
    lambda p: _counts(p),
    raw="b",
)


def _counts(p: Pool) -> Drawn:
    i, j = (
        p.pick(lambda x: floating(x) or integer(x)),
        p.pick(lambda x: x.dtype in (torch.int64, torch.int32)),
    )
    return None if i is None or j is None else ([i, j], {})


def _topk(p: Pool) -> Drawn:
    if (found := _along(p, real)) is None:
        return None
    i, x, dim = found
    return [i], {
        "k": p.r.randint(1, min(x.shape[dim], 9)),
        "dim": dim,
        "largest": p.r.random() < 0.5,
    }


def _kth(p: Pool) -> Drawn:
    if (found := _along(p, real)) is None:
        return None
    i, x, dim = found
    return [i], {"k": p.r.randint(1, x.shape[dim]), "dim": dim}


op("topk", "moves", "a.topk(k, dim, largest)[0]", _topk)
op("kthvalue", "moves", "a.kthvalue(k, dim)[0]", _kth)

"""Steps that change memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .hazards import convertible, exact, has_repeats, overlap, small, written
from .worlds import Picks, StepFunction, World

Tensors = Sequence[torch.Tensor]


def add_number(w: World, p: Picks) -> Tensors:
    t, n = w.pick(p), 1 + p.below(5)
    written(w, t)
    exact(w, lambda x: x.add_(n), t)
    t.add_(n)
    return []


def add_tensor(w: World, p: Picks) -> Tensors:
    t, other, alpha = w.pick(p), w.pick(p), p.of((1, 2, -1))
    written(w, t, other)
    exact(w, lambda x, y: x.add_(y, alpha=alpha), t, other)
    t.add_(other, alpha=alpha)
    return []


def subtract(w: World, p: Picks) -> Tensors:
    t, other = w.pick(p), w.pick(p)
    written(w, t, other)
    exact(w, lambda x, y: x.sub_(y), t, other)
    t.sub_(other)
    return []


def multiply_number(w: World, p: Picks) -> Tensors:
    t, n = w.pick(p), 2 + p.below(2)
    written(w, t)
    exact(w, lambda x: x.mul_(n), t)
    t.mul_(n)
    return []


def multiply_tensor(w: World, p: Picks) -> Tensors:
    t, other = w.pick(p), w.pick(p)
    written(w, t, other)
    exact(w, lambda x, y: x.mul_(y), t, other)
    t.mul_(other)
    return []


def operator_on_a_slice(w: World, p: Picks) -> Tensors:
    t, n = w.pick(p), 1 + p.below(3)
    exact(w, lambda x: x.add_(n), t)
    if t.dim():
        index = p.of(
            (0, slice(1, None), slice(None, None, 2), (Ellipsis, 0), (Ellipsis, slice(1, 2)))
        )
        written(w, t[index])
        t[index] += n
    return []


def fill(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    t.fill_(p.below(5))
    return []


def fill_from_tensor(w: World, p: Picks) -> Tensors:
    t, value = w.pick(p), w.pick(p)
    w.require(lambda: value.numel() == 1 and convertible(value, t.dtype) and not overlap(t, value))
    t.fill_(value.reshape(()))
    return []


def zero(w: World, p: Picks) -> Tensors:
    w.pick(p).zero_()
    return []


def copy(w: World, p: Picks) -> Tensors:
    t, source = w.pick(p), w.pick(p)
    written(w, t, source)
    w.require(lambda: convertible(source, t.dtype))
    t.copy_(source)
    return []


def copy_of_a_fitting_tensor(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    source = p.of([x for x in w.tensors if x.shape == t.shape and x.dtype == t.dtype])
    written(w, t, source)
    t.copy_(source, non_blocking=bool(p.below(2)))
    return []


def copy_shifted(w: World, p: Picks) -> Tensors:
    """A copy within one tensor, mostly of memory that it also writes."""
    t = w.pick(p)
    w.require(lambda: t.dim() > 0)
    d = p.below(t.dim())
    n = t.size(d)
    shift = min(1 + p.below(2), n)
    target, source = t.narrow(d, shift, n - shift), t.narrow(d, 0, n - shift)
    written(w, target, source)
    target.copy_(source)
    return []


def copy_from_cpu(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    shape = p.of((t.shape, t.shape[1:], (1,) * t.dim(), (7,)))
    dtype = p.of((t.dtype, torch.float32, torch.int64))
    values = (torch.arange(t.numel() + 7) % 9)[: max(torch.Size(shape).numel(), 0)].reshape(shape)
    written(w, t)
    t.copy_(values.to(dtype))
    return []


def copy_transposed_from_cpu(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    values = (
        (torch.arange(t.numel()) % 7)
        .reshape(tuple(reversed(t.shape)))
        .permute(tuple(reversed(range(t.dim()))))
    )
    written(w, t)
    t.copy_(values)
    return []


def clamp(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    written(w, t)
    w.require(lambda: small(t) and not t.is_complex())
    t.clamp_(1, 1 + p.below(4))
    return []


def add_out(w: World, p: Picks) -> Tensors:
    a, b, out = w.pick(p), w.pick(p), w.pick(p)
    written(w, out, a, b)
    exact(w, torch.add, a, b)
    w.require(lambda: _no_growth(a, b, out))
    torch.add(a, b, out=out)
    return []


def _no_growth(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """An ``out`` that grows shows memory of the CPU that nobody wrote."""
    try:
        sizes = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return True
    fresh = out.untyped_storage().nbytes() == 0 and out.storage_offset() == 0
    return sizes == out.shape or fresh


def multiply_out(w: World, p: Picks) -> Tensors:
    a, out = w.pick(p), w.pick(p)
    written(w, out, a)
    exact(w, lambda x: x * 2, a)
    w.require(lambda: a.shape == out.shape and not a.is_complex())
    torch.mul(a, 2, out=out)
    return []


def new_out(w: World, p: Picks) -> Tensors:
    a = w.pick(p)
    out = torch.empty(0, dtype=a.dtype, device=w.device)
    exact(w, torch.add, a, a)
    torch.add(a, a, out=out)
    return [out]


def cat_out(w: World, p: Picks) -> Tensors:
    a, b, out = w.pick(p), w.pick(p), w.pick(p)
    written(w, out, a, b)
    d = p.dim(a)
    w.require(lambda: a.dtype == b.dtype == out.dtype and out.numel() > 0)
    w.require(lambda: torch.cat([a, b], d).shape == out.shape)
    torch.cat([a, b], d, out=out)
    return []


def foreach_over_views(w: World, p: Picks) -> Tensors:
    """One op that writes several parts of one storage, as DDP's buckets do."""
    t, kind = w.pick(p), p.below(4)
    w.require(lambda: t.dim() > 0 and t.numel() > 0 and not has_repeats(t))
    parts = list(
        p.of((t.split(1, p.below(t.dim())), t.chunk(2, -1), [t.flatten()[:1], t.flatten()[1:]]))
    )
    exact(w, lambda x: x * 4, t)
    if kind == 0:
        torch._foreach_add_(parts, 1)
    elif kind == 1:
        torch._foreach_mul_(parts, 2)
    elif kind == 2:
        torch._foreach_zero_(parts)
    else:
        torch._foreach_copy_(parts, [torch.full_like(x, k) for k, x in enumerate(parts)])
    return []


def foreach_over_the_pool(w: World, p: Picks) -> Tensors:
    chosen = [w.pick(p) for _ in range(2 + p.below(2))]

    def independent() -> bool:
        return all(
            not has_repeats(a) and not any(overlap(a, b) for b in chosen[:i])
            for i, a in enumerate(chosen)
        )

    # Where one of them is refused, the CPU has written those before it.
    w.require(lambda: independent() and all(t.dtype != torch.bool for t in chosen))
    for t in chosen:
        exact(w, lambda x: x.add_(3), t)
    torch._foreach_add_(chosen, 3)
    return []


def exchange(w: World, p: Picks) -> Tensors:
    """Two halves of a tensor trade places, through a copy of one."""
    t = w.pick(p)
    w.require(lambda: t.dim() > 0 and t.size(0) >= 2 and not has_repeats(t))
    a, b = t[0], t[1]
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return []


WRITES: tuple[StepFunction, ...] = (
    add_number, add_tensor, add_tensor, subtract, multiply_number, multiply_tensor,
    operator_on_a_slice, fill, fill_from_tensor, zero, copy, copy, copy_of_a_fitting_tensor,
    copy_shifted, copy_from_cpu, copy_transposed_from_cpu, clamp, add_out, multiply_out, new_out,
    cat_out, foreach_over_views, foreach_over_the_pool, exchange,
)  # fmt: skip

"""Steps that look at the same memory in another way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .worlds import Picks, StepFunction, World

Tensors = Sequence[torch.Tensor]
# Dtypes that a dtype view may start from and end in: bytes of others would be no value of bool, or
# change when XLA computes in bfloat16.
BITCAST = (
    torch.float32, torch.int32, torch.int64, torch.uint8, torch.complex64, torch.int16,
    torch.float64,
)  # fmt: skip


def select(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    d = p.dim(t)
    return [t.select(d, p.maybe_wrong(p.below(max(t.size(d), 1)), 7))]


def negative_select(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t[-1 - p.below(2)]]


def slice_with_step(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    d = p.dim(t)
    index = [slice(None)] * (d % t.dim() if t.dim() else 0)
    return [t[(*index, slice(p.below(3), p.of((None, 2, 3, -1)), 1 + p.below(3)))]]


def narrow(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    d = p.dim(t)
    start = p.below(max(t.size(d), 1))
    return [t.narrow(d, start, p.maybe_wrong(p.below(t.size(d) - start + 1), 9))]


def t(w: World, p: Picks) -> Tensors:
    return [w.pick(p).t()]


def transpose(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.transpose(p.dim(t), p.maybe_wrong(p.dim(t), 5))]


def permute(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    dims = list(range(t.dim()))
    order = [dims.pop(p.below(len(dims))) for _ in range(len(dims))]
    return [t.permute(p.maybe_wrong(order, [0, 0]))]


def _sizes(t: torch.Tensor, p: Picks) -> list[int]:
    n = t.numel()
    factor = p.of([k for k in (1, 2, 3, 4) if n % k == 0])
    rest = n // factor
    return p.of(
        ([-1], [factor, rest], [rest, factor], [1, n], [factor, -1], [n, 1], [2, -1], list(t.shape))
    )


def view(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.view(_sizes(t, p))]


def reshape(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.reshape(_sizes(t, p))]


def flatten(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.flatten(p.dim(t), p.dim(t))]


def unflatten(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.unflatten(p.dim(t), (-1, p.of((1, 2, 3))))]


def expand(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    sizes = [p.maybe_wrong(3 if n == 1 else -1, 5) for n in t.shape]
    return [t.expand([2] * p.below(2) + sizes)]


def unsqueeze(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.unsqueeze(p.below(t.dim() + 1))]


def squeeze(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.squeeze(p.dim(t)) if p.below(2) else t.squeeze()]


def diagonal(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.diagonal(p.below(3) - 1, p.dim(t), p.dim(t))]


def unfold(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.unfold(p.dim(t), p.below(4), p.maybe_wrong(1 + p.below(2), 0))]


def as_strided(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    sizes = [p.of((1, 2, 3, 2)) for _ in range(p.below(3))]
    strides = [p.of((1, 2, 3, 0, 4)) for _ in sizes]
    strides[-1:] = [p.maybe_wrong(s, -1) for s in strides[-1:]]
    return [t.as_strided(sizes, strides, p.maybe_wrong(p.below(3), 1000))]


def view_dtype(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    target = p.of(BITCAST)
    return [t.view(target) if t.dtype in BITCAST else t.view(t.dtype)]


def split(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return t.split(p.of((1, 2, [1, 2])), p.dim(t))[:3]


def chunk(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return t.chunk(1 + p.below(3), p.dim(t))


def unbind(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return t.unbind(p.dim(t))[:3]


def detach(w: World, p: Picks) -> Tensors:
    return [w.pick(p).detach()]


def data(w: World, p: Picks) -> Tensors:
    return [w.pick(p).data]


def view_as_real(w: World, p: Picks) -> Tensors:
    return [torch.view_as_real(w.pick(p))]


def view_as_complex(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(lambda: t.dtype in (torch.float32, torch.float64) or p.below(20) == 19)
    return [torch.view_as_complex(t)]


def real_and_imaginary(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.imag if p.below(2) else t.real]


def conjugate(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    w.require(t.is_complex)
    return [t.conj()]


def index_by_ellipsis(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [p.of((t[...], t[:], t[None], t[..., None]) if t.dim() else (t[...], t[None]))]


def movedim(w: World, p: Picks) -> Tensors:
    t = w.pick(p)
    return [t.movedim(p.dim(t), p.dim(t))]


def on_the_same_storage(w: World, p: Picks) -> Tensors:
    """A tensor made anew on a storage, as checkpoints and FSDP make them."""
    t = w.pick(p)
    dtype = p.of(BITCAST) if t.dtype in BITCAST else t.dtype
    w.require(lambda: t.untyped_storage().nbytes() % 8 == 0)
    n = t.untyped_storage().nbytes() // torch.empty(0, dtype=dtype).element_size()
    offset = p.below(2) if n > 1 else 0
    empty = torch.empty(0, dtype=dtype, device=w.device)
    return [empty.set_(t.untyped_storage(), offset, (n - offset,), (1,))]


VIEWS: tuple[StepFunction, ...] = (
    select, negative_select, slice_with_step, slice_with_step, narrow, t, transpose, permute, view,
    reshape, flatten, unflatten, expand, unsqueeze, squeeze, diagonal, unfold, as_strided,
    view_dtype,
    split, chunk, unbind, detach, data, view_as_real, view_as_complex, real_and_imaginary,
    conjugate,
    index_by_ellipsis, movedim, on_the_same_storage,
)  # fmt: skip

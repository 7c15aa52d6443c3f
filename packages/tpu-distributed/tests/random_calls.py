"""Carries a random collective out, and computes by plain PyTorch what it must give."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from random_cases import Case
from rank_tensors import DEVICE
from tpu_distributed.torch_compat import functional_collective

_FACTOR = 0.5
_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Attempt:
    """One case on this rank.

    Args:
        case: The case.
        group: Its process group.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.case, self.group = case, group
        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.me = group.size(), group.rank()
        self.root = case.root % self.size
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self._works: list[Any] = []
        self._expected: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read: list[torch.Tensor] = []

    def start(self) -> None:
        """Call the collective."""
        CALLS[self.case.kind](self)
        if self.case.overwrites:
            for tensor in self._read:
                tensor.zero_()

    def finish(self) -> None:
        """Wait for it, and compare.

        Raises:
            AssertionError: A tensor does not hold what it must.
        """
        for work in self._works:
            work.wait()
        # XLA divides by three by multiplying with a third, as NCCL does.
        rounds = self.case.op == "AVG" and self.dtype.is_floating_point and self.size == 3
        rtol = torch.finfo(self.dtype).eps if rounds else 0
        for actual, expected in self._expected:
            assert actual.device == DEVICE
            torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=0)

    # What the kinds below are written with.

    def values(self, rank: int, item: int = 0, shape: Sequence[int] | None = None) -> torch.Tensor:
        """What a rank gives: small whole numbers, which every dtype adds exactly."""
        name = f"{self.case.seed} {rank} {item}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        low, high = (-3, 4) if self.dtype.is_signed else (0, 5)
        if self.dtype == torch.bool:
            low, high = 0, 2
        size = self.case.shape if shape is None else tuple(shape)
        return torch.randint(low, high, size, generator=generator).to(self.dtype)

    def everyones(self, item: int = 0, shape: Sequence[int] | None = None) -> list[torch.Tensor]:
        """What each rank gives."""
        return [self.values(rank, item, shape) for rank in range(self.size)]

    def reduced(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The reduction of CPU tensors."""
        op, dtype = self.case.op, self.dtype
        if op == "PREMUL_SUM":
            values = [v * _FACTOR for v in values]
        # XLA adds bools as `or`.
        plus = torch.logical_or if dtype == torch.bool else torch.add
        result = functools.reduce(_FOLDS.get(op, plus), values)
        if op != "AVG":
            return result.to(dtype)
        return result.div(self.size, rounding_mode=None if dtype.is_floating_point else "trunc")

    def op(self) -> Any:
        """The reduce op as c10d has it."""
        if self.case.op == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(_FACTOR)
        return getattr(dist.ReduceOp, self.case.op)

    def given(self, values: torch.Tensor) -> torch.Tensor:
        """A device tensor with these values."""
        base, view = _laid_out(values, self.case.given)
        tensor = view(base.to(DEVICE))
        if self.case.given == "computed":
            tensor = torch.clone(tensor)  # recorded, and not computed yet
        self._read.append(tensor)
        return tensor

    def written(self, values: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """A device tensor that must have these values in the end, and others before."""
        before = torch.ones_like(values) if before is None else before
        base, view = _laid_out(before, self.case.written)
        on_device = base.to(DEVICE)
        expected = base.clone()
        view(expected).copy_(values)
        self._expected.append((on_device, expected))
        return view(on_device)

    def returned(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Expect the values of a tensor that a call has returned."""
        self._expected.append((tensor, values))

    def call(self, function: Callable[..., Any], *args: Any, **more: Any) -> None:
        """Call a function of `torch.distributed` in the group."""
        wants = self.case.asynchronous
        work = function(*args, **more, group=self.group, async_op=wants)
        assert (work is not None) == wants
        if wants:
            self._works.append(work)

    def later(self, work: Any) -> None:
        """Wait for a work at the end."""
        self._works.append(work)

    def sizes(self, start: int) -> list[int]:
        """Uneven sizes, some of them zero."""
        return [(self.case.root + start + 3 * i) % 4 for i in range(self.size)]


def _laid_out(
    values: torch.Tensor, layout: str
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Memory, and which part of it holds the values."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, 1).contiguous(), lambda base: base.transpose(0, 1)
    if layout == "strided" and values.dim():
        base = torch.ones(2 * values.shape[0] + 1, *values.shape[1:]).to(values.dtype)
        base[1::2] = values
        return base, lambda base: base[1::2]
    if layout == "part":
        base = torch.ones(values.numel() + 5).to(values.dtype)
        base[3 : 3 + values.numel()] = values.reshape(-1)
        return base, lambda base: base[3 : 3 + values.numel()].view(values.shape)
    return values.clone(), lambda base: base


def _all_reduce(a: Attempt) -> None:
    x = a.written(a.reduced(a.everyones()), before=a.values(a.me))
    a.call(dist.all_reduce, x, a.op())


def _reduce(a: Attempt) -> None:
    own = a.values(a.me)
    x = a.written(a.reduced(a.everyones()) if a.me == a.root else own, before=own)
    a.call(dist.reduce, x, a.ranks[a.root], a.op())


def _reduce_scatter(a: Attempt) -> None:
    out = a.written(a.reduced(a.everyones(item=a.me)))
    rows = [a.given(a.values(a.me, item)) for item in range(a.size)]
    a.call(dist.reduce_scatter, out, rows, a.op())


def _reduce_scatter_uneven(a: Attempt) -> None:
    shapes = [(n, *a.case.shape[1:]) for n in a.sizes(1)]
    out = a.written(a.reduced(a.everyones(a.me, shapes[a.me])))
    rows = [a.given(a.values(a.me, item, shape)) for item, shape in enumerate(shapes)]
    a.call(dist.reduce_scatter, out, rows, a.op())


def _reduce_scatter_tensor(a: Attempt) -> None:
    whole = (a.size, *a.case.shape)
    out = a.written(a.reduced([v[a.me] for v in a.everyones(shape=whole)]))
    values = a.values(a.me, shape=whole)
    if a.case.root % 2 and a.case.shape:  # concatenated rather than stacked
        values = values.flatten(0, 1)
    a.call(dist.reduce_scatter_tensor, out, a.given(values), a.op())


def _all_reduce_coalesced(a: Attempt) -> None:
    shapes = [a.case.shape, (2, *a.case.shape), (3,)]
    tensors = [
        a.written(a.reduced(a.everyones(i, shape)), before=a.values(a.me, i, shape))
        for i, shape in enumerate(shapes)
    ]
    a.call(dist.all_reduce_coalesced, tensors, a.op())


def _coalescing_manager(a: Attempt) -> None:
    first = a.written(a.reduced(a.everyones()), before=a.values(a.me))
    second = a.written(a.reduced(a.everyones(1)), before=a.values(a.me, 1))
    wants = a.case.asynchronous
    with dist._coalescing_manager(group=a.group, device=DEVICE, async_ops=wants) as manager:
        dist.all_reduce(first, a.op(), group=a.group)
        dist.all_reduce(second, a.op(), group=a.group)
    if wants:
        a.later(manager)


def _broadcast(a: Attempt) -> None:
    x = a.written(a.values(a.root), before=a.values(a.me))
    a.call(dist.broadcast, x, a.ranks[a.root])


def _all_gather(a: Attempt) -> None:
    outs = [a.written(v) for v in a.everyones()]
    a.call(dist.all_gather, outs, a.given(a.values(a.me)))


def _all_gather_uneven(a: Attempt) -> None:
    shapes = [(n, *a.case.shape[1:]) for n in a.sizes(1)]
    outs = [a.written(a.values(r, 0, shape)) for r, shape in enumerate(shapes)]
    a.call(dist.all_gather, outs, a.given(a.values(a.me, 0, shapes[a.me])))


def _all_gather_into_tensor(a: Attempt) -> None:
    values = torch.stack(a.everyones())
    if a.case.root % 2 and a.case.shape:
        values = values.flatten(0, 1)
    a.call(dist.all_gather_into_tensor, a.written(values), a.given(a.values(a.me)))


def _gather(a: Attempt) -> None:
    outs = [a.written(v) for v in a.everyones()] if a.me == a.root else None
    a.call(dist.gather, a.given(a.values(a.me)), outs, dst=a.ranks[a.root])


def _scatter(a: Attempt) -> None:
    out = a.written(a.values(a.root, a.me))
    rows = None
    if a.me == a.root:
        rows = [a.given(a.values(a.me, item)) for item in range(a.size)]
    a.call(dist.scatter, out, rows, src=a.ranks[a.root])


def _all_to_all(a: Attempt) -> None:
    rest = a.case.shape[1:]
    outs = [a.written(a.values(r, a.me, (a.sizes(r)[a.me], *rest))) for r in range(a.size)]
    gives = a.sizes(a.me)
    rows = [a.given(a.values(a.me, to, (gives[to], *rest))) for to in range(a.size)]
    a.call(dist.all_to_all, outs, rows)


def _all_to_all_single(a: Attempt) -> None:
    out = a.written(torch.cat([v[None] for v in a.everyones(a.me)]))
    rows = torch.stack([a.values(a.me, to) for to in range(a.size)])
    a.call(dist.all_to_all_single, out, a.given(rows))


def _all_to_all_single_uneven(a: Attempt) -> None:
    rest = a.case.shape[1:]
    gives, gets = a.sizes(a.me), [a.sizes(r)[a.me] for r in range(a.size)]
    out = a.written(torch.cat([a.values(r, a.me, (n, *rest)) for r, n in enumerate(gets)]))
    rows = torch.cat([a.values(a.me, to, (n, *rest)) for to, n in enumerate(gives)])
    a.call(dist.all_to_all_single, out, a.given(rows), gets, gives)


def _send_recv(a: Attempt) -> None:
    to, tag = (a.root + 1) % a.size, a.case.seed % 5
    if to == a.root or a.me not in (to, a.root):
        return
    peer = a.ranks[to if a.me == a.root else a.root]
    if a.me == a.root:
        x = a.given(a.values(a.me))
        if a.case.asynchronous:
            a.later(dist.isend(x, peer, a.group, tag))
        else:
            dist.send(x, peer, a.group, tag)
        return
    y = a.written(a.values(a.root))
    if a.case.asynchronous:
        a.later(dist.irecv(y, peer, a.group, tag))
    else:
        assert dist.recv(y, peer, a.group, tag) == peer


def _batch_isend_irecv(a: Attempt) -> None:
    if a.size == 1:
        return
    to, source = (a.me + 1) % a.size, (a.me - 1) % a.size
    x, y = a.given(a.values(a.me)), a.written(a.values(source))
    operations = [
        dist.P2POp(dist.isend, x, a.ranks[to], a.group),
        dist.P2POp(dist.irecv, y, a.ranks[source], a.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        a.later(work)


def _functional_all_reduce(a: Attempt) -> None:
    if a.case.op == "PREMUL_SUM":  # functional collectives take names of ops
        return
    x = a.given(a.values(a.me))
    a.returned(
        funcol.all_reduce(x, a.case.op.lower(), a.group),
        a.reduced(a.everyones()),
    )


def _as_taken(x: torch.Tensor) -> torch.Tensor:
    # Functional collectives of torch 2.11 take contiguous tensors alone.
    return x if hasattr(funcol, "all_gather_single") else x.contiguous()


def _functional_reduce_scatter(a: Attempt) -> None:
    if a.case.op == "PREMUL_SUM":
        return
    whole = (3, 2 * a.size)
    x = a.given(a.values(a.me, shape=whole))
    expected = a.reduced(a.everyones(shape=whole)).chunk(a.size, 1)[a.me]
    result = functional_collective("reduce_scatter")(_as_taken(x), a.case.op.lower(), 1, a.group)
    a.returned(result, expected)


def _functional_all_gather(a: Attempt) -> None:
    shape = (2, *a.case.shape)
    x = a.given(a.values(a.me, shape=shape))
    dim = a.case.root % len(shape)
    a.returned(
        funcol.all_gather_tensor(_as_taken(x), dim, a.group),
        torch.cat(a.everyones(shape=shape), dim),
    )


def _functional_all_to_all(a: Attempt) -> None:
    rest = a.case.shape[1:]
    gives, gets = a.sizes(a.me), [a.sizes(r)[a.me] for r in range(a.size)]
    rows = torch.cat([a.values(a.me, to, (n, *rest)) for to, n in enumerate(gives)])
    expected = torch.cat([a.values(r, a.me, (n, *rest)) for r, n in enumerate(gets)])
    a.returned(funcol.all_to_all_single(a.given(rows), gets, gives, a.group), expected)


def _object(a: Attempt, rank: int, item: int = 0) -> object:
    return {"of": rank, item: "x" * (a.case.seed % 300 * (rank + 1)), "shape": a.case.shape}


def _all_gather_object(a: Attempt) -> None:
    everyone: list[object] = [None] * a.size
    dist.all_gather_object(everyone, _object(a, a.me), a.group)
    assert everyone == [_object(a, r) for r in range(a.size)]


def _broadcast_object_list(a: Attempt) -> None:
    objects = [_object(a, a.me), _object(a, a.me, 1)]
    dist.broadcast_object_list(objects, a.ranks[a.root], a.group)
    assert objects == [_object(a, a.root), _object(a, a.root, 1)]


def _scatter_object_list(a: Attempt) -> None:
    out: list[object] = [None]
    objects = [_object(a, a.root, item) for item in range(a.size)]
    dist.scatter_object_list(out, objects, a.ranks[a.root], a.group)
    assert out == [_object(a, a.root, a.me)]


def _barrier(a: Attempt) -> None:
    work = dist.barrier(a.group, async_op=a.case.asynchronous)
    if a.case.asynchronous:
        a.later(work)


CALLS: dict[str, Callable[[Attempt], None]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if callable(function) and getattr(function, "__module__", "") == __name__ and name[0] == "_"
}

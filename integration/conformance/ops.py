"""Checks of OpInfo: each runs samples on the CPU and on the device and compares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from conformance import compare
from conformance.compare import Different, ToDevice
from conformance.entries import OPS, Entry, is_listed
from conformance.outcomes import (
    Raised,
    both_returned,
    cotangents,
    named,
    outcome,
    same_error,
    spread,
)

Arguments = tuple[Any, list[Any], dict[str, Any]]


def check(entry: Entry, limit: int) -> int:
    """Run an entry; returns the number of samples.

    Raises:
        Different: The device's result or error is not the CPU's.
    """
    op = OPS[entry.name]
    if entry.part == "errors":
        return _errors(entry, op)
    needs_grad = entry.part in ("gradients", "gradgrad", "forward_mode")
    samples = spread(op.sample_inputs("cpu", entry.dtype, requires_grad=needs_grad), limit)
    for index, sample in enumerate(samples):
        with named(f"sample {index} of {len(samples)}"):
            _CHECKS[entry.part](entry, op, sample, index)
    return len(samples)


def _arguments(sample: Any) -> Arguments:
    return sample.input, list(sample.args), dict(sample.kwargs)


def _read(result: Any) -> Any:
    """Values, on the host: what went wrong on the device comes out here at the latest."""
    return tree_map(compare.to_host, result)


def both(
    entry: Entry,
    run: Callable[[Arguments], Any],
    sample: Any,
    reference: Callable[[Arguments], Any] | None = None,
) -> None:
    """Compare ``run`` on both sides; both may raise, then the same type of error.

    ``reference`` is ``run`` for arguments with more digits, where it is another.
    """
    inputs = _arguments(sample)
    on_device = _moved(entry.name, inputs)
    # The CPU's run may write to its inputs.
    wide = tree_map(compare.widened, inputs) if not is_listed("random", entry.name) else None
    want = outcome(run, inputs)
    got = outcome(_on_default_device, lambda: run(on_device), on_device, want)
    if not both_returned(got, want):
        return
    if is_listed("random", entry.name) or is_listed("uninitialized", entry.name):
        return
    if entry.part in ("forward", "out") and is_listed("ties", entry.name):
        got, want = _without_ties(entry, sample, got), _without_ties(entry, sample, want)
    compare.values(got, want, None if wide is None else lambda: (reference or run)(wide))


def _without_ties(entry: Entry, sample: Any, result: Any) -> Any:
    """Elements in place of their positions: which of equal ones is named is not defined."""
    x = sample.input.detach() if isinstance(sample.input, torch.Tensor) else sample.input

    def element(r: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return r
        named = [v for v in (*sample.args, *sample.kwargs.values()) if type(v) is int]
        for dim in (*(v for v in named if -x.dim() <= v < x.dim()), -1):
            dim %= x.dim()
            at = r if r.dim() == x.dim() else r.unsqueeze(dim) if r.dim() == x.dim() - 1 else r
            others = [i for i in range(x.dim()) if i != dim]
            if at.dim() != x.dim() or any(at.shape[i] != x.shape[i] for i in others):
                continue
            if at.numel() and (int(at.min()) < 0 or int(at.max()) >= x.shape[dim]):
                raise Different("a position that there is not")
            lines = at.movedim(dim, -1).reshape(-1, at.shape[dim]).tolist()
            if any(len(set(line)) < len(line) for line in lines):
                raise Different("one position twice")
            return x.gather(dim, at)
        return r

    if isinstance(result, torch.Tensor):
        return element(result) if result.shape == x.shape else result
    if entry.part == "out":
        same, *found = result
        if len(found) == 1:
            return [same, element(found[0])]
    *values, positions = result
    return [*values, element(positions)]


def _moved(name: str, inputs: Arguments) -> Arguments:
    if is_listed("indices_on_cpu", name):
        return tree_map(ToDevice(), inputs[0]), *inputs[1:]
    return tree_map(ToDevice(), inputs)


def _on_default_device(run: Callable[[], Any], inputs: Arguments, want: Any = None) -> Any:
    """Results on the host; what names neither a tensor nor a device runs on the default device."""
    with nullcontext() if _is_on_device(inputs) else torch.device(compare.DEVICE):
        result = run()
    if want is not None and not isinstance(want, Raised):
        compare.shapes(result, want)
        compare.places(result)
    return _read(result)


def _plain(op: Any, sample: Any, inputs: Arguments) -> Any:
    result = op(inputs[0], *inputs[1], **inputs[2])
    return sample.output_process_fn_grad(result)


def _forward(entry: Entry, op: Any, sample: Any, index: int) -> None:
    both(entry, lambda inputs: _plain(op, sample, inputs), sample)


def _leaves(inputs: Arguments) -> list[torch.Tensor]:
    return [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]


def _grads(op: Any, sample: Any, inputs: Arguments, order: int) -> Any:
    leaves = _leaves(inputs)
    result = _plain(op, sample, inputs)
    for left in range(order, 0, -1):
        outputs = [
            o for o in tree_leaves(result) if isinstance(o, torch.Tensor) and o.requires_grad
        ]
        if not outputs or not leaves:
            return [None]
        result = torch.autograd.grad(
            *(outputs, leaves, cotangents(outputs)), allow_unused=True, create_graph=left > 1
        )
    return list(result)


def _gradients(entry: Entry, op: Any, sample: Any, index: int) -> None:
    both(entry, lambda inputs: _grads(op, sample, inputs, 1), sample)


def _gradgrad(entry: Entry, op: Any, sample: Any, index: int) -> None:
    both(entry, lambda inputs: _grads(op, sample, inputs, 2), sample)


def _tangents(op: Any, sample: Any, inputs: Arguments) -> Any:
    with forward_ad.dual_level():
        tangents = iter(cotangents(leaves := _leaves(inputs)))
        duals = {id(x): forward_ad.make_dual(x.detach(), next(tangents)) for x in leaves}

        def dual(x: Any) -> Any:
            return duals.get(id(x), x) if isinstance(x, torch.Tensor) else x

        result = _plain(op, sample, tree_map(dual, inputs))
        outputs = [o for o in tree_leaves(result) if isinstance(o, torch.Tensor)]
        unpacked = [forward_ad.unpack_dual(o) for o in outputs]
        return [(p.detach(), None if t is None else t.detach()) for p, t in unpacked]


def _forward_mode(entry: Entry, op: Any, sample: Any, index: int) -> None:
    both(entry, lambda inputs: _tangents(op, sample, inputs), sample)


def _blank(x: torch.Tensor, form: int) -> torch.Tensor:
    """An ``out=`` tensor like ``x``: of its shape, empty, or with other strides."""
    if form == 1:
        return x.new_empty((0,))
    if form == 2 and x.dim() > 1:
        return x.new_zeros(x.shape[::-1]).permute(*range(x.dim())[::-1])
    return torch.zeros_like(x)


def _out(entry: Entry, op: Any, sample: Any, index: int) -> None:
    given = _arguments(sample)
    with torch.no_grad():
        expected = outcome(lambda: op(given[0], *given[1], **given[2]))
    if isinstance(expected, Raised):
        return
    tensors = [x for x in tree_leaves(expected) if isinstance(x, torch.Tensor)]

    def run(inputs: Arguments, outs: list[torch.Tensor]) -> Any:
        out = outs[0] if isinstance(expected, torch.Tensor) else tuple(outs)
        result = op(inputs[0], *inputs[1], **inputs[2], out=out)
        same = [a is b for a, b in zip(tree_leaves(result), outs)]
        return [same, *tree_leaves(sample.output_process_fn_grad(result))]

    def with_form(inputs: Arguments, digits: Callable[[Any], Any] = lambda x: x) -> Any:
        device = compare.DEVICE if _is_on_device(inputs) else torch.empty(0).device
        outs = [digits(_blank(t, index % 3)).to(device) for t in tensors]
        return run(inputs, outs)

    both(entry, with_form, sample, lambda inputs: with_form(inputs, compare.widened))
    if index:
        return

    def of_integers(inputs: Arguments) -> Any:
        device = compare.DEVICE if _is_on_device(inputs) else torch.empty(0).device
        return run(
            inputs, [torch.zeros(t.shape, dtype=torch.int64, device=device) for t in tensors]
        )

    if entry.dtype.is_floating_point and all(t.is_floating_point() for t in tensors):
        both(entry, of_integers, sample)


def _is_on_device(inputs: Arguments) -> bool:
    found = [x.device.type for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    named = inputs[2].get("device")
    return compare.DEVICE in found or (not found and str(named) == compare.DEVICE)


def _inplace(entry: Entry, op: Any, sample: Any, index: int) -> None:
    if sample.broadcasts_input:
        return

    def run(inputs: Arguments) -> Any:
        x = inputs[0]
        x = x.clone() if isinstance(x, torch.Tensor) else [t.clone() for t in x]
        result = op.inplace_variant(x, *inputs[1], **inputs[2])
        return [result, x]

    both(entry, run, sample)


def _errors(entry: Entry, op: Any) -> int:
    cases = list(op.error_inputs("cpu"))  # all of them, as each is of its own kind
    for index, case in enumerate(cases):
        sample = case.sample_input
        inputs = _arguments(sample)
        on_device = outcome(lambda inputs=inputs: _moved(entry.name, inputs))
        want = outcome(lambda inputs=inputs: op(inputs[0], *inputs[1], **inputs[2]))
        if not isinstance(want, Raised) or isinstance(on_device, Raised):
            continue  # about another device, or a dtype that moves to none
        d = on_device
        got = outcome(_on_default_device, lambda d=d: op(d[0], *d[1], **d[2]), d)
        same_error(index, got, want, case.error_regex)
    return len(cases)


_CHECKS = {
    "forward": _forward,
    "gradients": _gradients,
    "gradgrad": _gradgrad,
    "forward_mode": _forward_mode,
    "out": _out,
    "inplace": _inplace,
}

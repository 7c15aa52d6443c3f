"""Checks of OptimizerInfo: some steps on the device and on the CPU, from the same parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_optimizers import OptimizerErrorEnum
from torch.utils._pytree import tree_map

from conformance import compare
from conformance.entries import OPTIMIZERS, Entry
from conformance.outcomes import Raised, both_returned, named, outcome, same_error, spread

STEPS = 4


def check(entry: Entry, limit: int) -> int:
    """Run an entry; returns the number of settings.

    Raises:
        Different: Parameters or state on the device are not the CPU's.
    """
    info = OPTIMIZERS[entry.name]
    if entry.part == "optimizer_errors":
        return _errors(info)
    count = 0
    for case in spread(info.optim_inputs_func(device="cpu"), limit):
        for flags in _implementations(info, case.kwargs):
            kwargs = {**case.kwargs, **flags}
            count += 1
            with named(f"{case.desc or 'default'} {kwargs}"):
                _compare(info, kwargs, entry.dtype)
    return count


def _implementations(info: Any, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {}
    if "foreach" in kwargs or "fused" in kwargs or "differentiable" in kwargs:
        return
    if "foreach" in info.supported_impls:
        yield {"foreach": False}
        yield {"foreach": True}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield {"fused": True}


def _parameters(info: Any, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    # Muon takes matrices; sparse gradients have rows.
    only_matrices = info.only_supports_sparse_grads or info.optim_cls is torch.optim.Muon
    shapes = [(4, 3), (3, 5) if only_matrices else (3,), (2, 2)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [torch.nn.Parameter(t.to(dtype)) for t in made]


def _run(info: Any, kwargs: dict[str, Any], params: list[torch.nn.Parameter], dtype: Any) -> Any:
    device = params[0].device
    given = {
        k: v.detach().clone().to(device) if _moves(v, kwargs) else v for k, v in kwargs.items()
    }
    optimizer = info.optim_cls(params, **given)
    sparse = info.only_supports_sparse_grads
    for step in range(STEPS):
        # A closure is one objective: the curvature between two is decided by the last digits.
        generator = torch.Generator().manual_seed(0 if info.step_requires_closure else step)
        targets = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
        moved = [t.to(dtype).to(device) for t in targets]

        def closure(moved: list[torch.Tensor] = moved) -> torch.Tensor:
            optimizer.zero_grad()
            used = [(_rows(p, t) if sparse else (p, t)) for p, t in zip(params, moved)]
            loss = sum(((p - t) ** 2).sum() for p, t in used)
            loss.backward()
            return loss

        if not info.step_requires_closure:
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
    state = [optimizer.state.get(p, {}) for p in params]
    # A number on one side may be a tensor of one element on the other.
    numbers = [
        {k: torch.tensor(v, dtype=dtype) if isinstance(v, float) else v for k, v in s.items()}
        for s in state
    ]
    tensors = [{k: v for k, v in s.items() if isinstance(v, torch.Tensor)} for s in numbers]
    return tree_map(compare.to_host, [[p.detach() for p in params], tensors])


def _rows(p: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows, looked up so that the gradient is sparse."""
    rows = torch.tensor([1, 0, 1], device=p.device)
    return torch.nn.functional.embedding(rows, p, sparse=True), t[rows]


def _moves(value: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the settings belongs on the parameters' device."""
    return isinstance(value, torch.Tensor) and bool(kwargs.get("fused") or kwargs.get("capturable"))


def _compare(info: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    on_cpu = _parameters(info, dtype)
    on_device = [torch.nn.Parameter(p.detach().to(compare.DEVICE)) for p in on_cpu]
    wide_dtype = compare.WIDER.get(dtype, dtype)
    wide = [torch.nn.Parameter(p.detach().to(wide_dtype)) for p in on_cpu]
    want = outcome(_run, info, kwargs, on_cpu, dtype)
    got = outcome(_run, info, kwargs, on_device, dtype)
    if not both_returned(got, want):
        return
    compare.shapes(got, want)
    compare.values(got, want, lambda: _run(info, kwargs, wide, wide_dtype))


def _errors(info: Any) -> int:
    cases = 0
    for dtype in (torch.float32, torch.float64):
        on_cpu, on_device = (
            {
                (case.optimizer_error_input.desc, case.error_regex): case
                for case in info.optim_error_inputs_func(device=device, dtype=dtype)
            }
            for device in ("cpu", compare.DEVICE)
        )
        # The database has more for some devices than for others.
        for name in on_cpu.keys() & on_device.keys():
            cases += 1
            want, got = outcome(_fail, info, on_cpu[name]), outcome(_fail, info, on_device[name])
            if isinstance(want, Raised):
                same_error(name, got, want)
    return cases


def _fail(info: Any, case: Any) -> None:
    given = case.optimizer_error_input
    optimizer = info.optim_cls(given.params, **given.kwargs)
    if case.error_on is OptimizerErrorEnum.STEP_ERROR:
        optimizer.step()

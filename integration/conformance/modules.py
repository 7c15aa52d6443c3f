"""Checks of ModuleInfo: outputs and gradients of a module, in training and evaluation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleErrorEnum
from torch.utils._pytree import tree_leaves, tree_map

from conformance import compare
from conformance.compare import ToDevice
from conformance.entries import MODULES, Entry, is_listed
from conformance.outcomes import (
    Raised,
    both_returned,
    cotangents,
    named,
    outcome,
    same_error,
    spread,
)


def check(entry: Entry, limit: int) -> int:
    """Run an entry; returns the number of samples.

    Raises:
        Different: The device's result, gradient, buffer or error is not the CPU's.
    """
    info = MODULES[entry.name]
    if entry.part == "module_errors":
        return _errors(info)
    count = 0
    for training in (True, False):
        made = info.module_inputs_func(
            info, device="cpu", dtype=entry.dtype, requires_grad=True, training=training
        )
        for index, sample in enumerate(spread(made, limit)):
            count += 1
            with named(f"sample {index}, training={training}"):
                _compare(entry, info, sample, training)
    return count


def _module(info: Any, given: Any, dtype: torch.dtype | None) -> torch.nn.Module:
    torch.manual_seed(0)
    module = info.module_cls(*given.args, **given.kwargs)
    return module.to(dtype) if dtype is not None else module


def _compare(entry: Entry, info: Any, sample: Any, training: bool) -> None:
    module = _module(info, sample.constructor_input, entry.dtype).train(training)
    given = (list(sample.forward_input.args), dict(sample.forward_input.kwargs))
    if info.is_lazy:
        with torch.no_grad():
            module(*tree_map(copy.copy, given[0]), **given[1])
    twin = copy.deepcopy(module).to(compare.DEVICE)
    twin_given = tree_map(ToDevice(), given)
    wide = tree_map(compare.widened, given)
    wide_module = copy.deepcopy(module).to(compare.WIDER.get(entry.dtype, entry.dtype))
    want = outcome(_run, module, given)
    got = outcome(_run, twin, twin_given)
    if not both_returned(got, want):
        return
    compare.shapes(got, want)
    if not (training and is_listed("random_in_training", entry.name)):
        compare.values(got, want, lambda: _run(wide_module, wide))


def _run(module: torch.nn.Module, given: Any) -> Any:
    """Outputs, gradients of inputs and parameters, and buffers."""
    result = module(*given[0], **given[1])
    outputs = [o for o in tree_leaves(result) if isinstance(o, torch.Tensor) and o.requires_grad]
    inputs = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    grads: Any = []
    if outputs and leaves:
        grads = torch.autograd.grad(outputs, leaves, cotangents(outputs), allow_unused=True)
    return tree_map(compare.to_host, [_plain(result), list(grads), dict(module.named_buffers())])


def _plain(result: Any) -> list[Any]:
    """Tensors of a result, whatever classes hold them (packed sequences, named tuples)."""
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def _errors(info: Any) -> int:
    cases = list(
        info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
        )
    )
    for index, case in enumerate(cases):
        sample = case.module_error_input

        def run(device: str, case: Any = case, sample: Any = sample) -> Any:
            module = _module(info, sample.constructor_input, None)
            if case.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
                return None
            given = (list(sample.forward_input.args), dict(sample.forward_input.kwargs))
            if device != "cpu":
                module, given = module.to(device), tree_map(ToDevice(), given)
            return tree_map(compare.to_host, _plain(module(*given[0], **given[1])))

        want, got = outcome(run, "cpu"), outcome(run, compare.DEVICE)
        if isinstance(want, Raised):
            same_error(index, got, want)
    return len(cases)

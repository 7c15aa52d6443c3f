"""Numerical comparison of a module on the device with the CPU in float64, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree

from tpu_core.comparison.exact import float64
from tpu_core.comparison.layers import RecordedCalls, recorded
from tpu_core.comparison.products import EPSILONS, TpuProducts, tpu_products
from tpu_core.comparison.rows import Comparison, Row, rows_of
from tpu_core.comparison.trees import differentiable, in_float64, on_cpu, on_device
from tpu_core.config import override

__all__ = ["Comparison", "Row", "compare"]

_TOLERANCE = 64.0


def compare(
    module: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    backward: bool = True,
    tolerance: float = _TOLERANCE,
    kwargs: Mapping[str, Any] | None = None,
    emulate: Literal["medium", "high"] | None = None,
) -> Comparison:
    """Compare a module on the device with itself on the CPU in float64, layer by layer.

    The module and its arguments are copied: parameters, buffers, gradients and arguments stay as
    they are. Autocast, `torch.tpu.precision` and the eager mode that are in force hold for the
    device's run, and so compare one precision or mode with exact arithmetic.

    Two errors are measured for each submodule. The *own* error compares its results with those that
    float64 computes from the same inputs, the device's: rounding within this layer alone. The
    *accumulated* error compares with the float64 run of the whole module.

    Args:
        module: The module, on any device.
        *args: Its arguments; tensors, on any device, or what PyTorch's pytrees hold of them.
        loss: Scalar to differentiate, from the module's output. The attribute ``loss`` of the
            output where it has one, else a sum of all floating-point outputs with weights
            from -4 to 4.
        backward: Whether gradients are compared, too.
        tolerance: Own error up to which a layer counts as right, in roundings: see `Row.units`.
        kwargs: Keyword arguments of the module.
        emulate: Compare what a TPU would compute at this precision of float32 products, in place of
            the device: CPU kernels run, and the operands of each product are rounded to bfloat16
            (``"medium"``) or split into two of it (``"high"``). Own errors then count in roundings
            of such operands, in layers that have products.

    Returns:
        A `Comparison`: prints as a table; ``first`` is the first row out of tolerance, or None.

    Raises:
        ValueError: The module draws random numbers, which the CPU would draw otherwise: compare in
            ``eval()`` mode, or with a dropout of 0. With ``emulate``: no such precision, autocast
            is in force, or an op computes products within a kernel that does more.

    Example:
        >>> print(torch.tpu.compare(model, batch))
        >>> print(torch.tpu.compare(model, batch, emulate="medium"))
    """
    if emulate is not None:
        return _compare_emulated(emulate, module, args, kwargs, loss, backward, tolerance)
    on_tpu = copy.deepcopy(module).to("tpu")
    exact = in_float64(copy.deepcopy(module).to("cpu"))
    pristine = copy.deepcopy(exact)
    given = (args, dict(kwargs or {}))
    get_rng_state = torch.get_device_module("tpu").get_rng_state
    before = get_rng_state()
    device_calls = _run(on_tpu, _pytree.tree_map(on_device, given), loss, backward)
    _require_no_draws(torch.equal(before, get_rng_state()))
    with float64():
        exact_calls = _run(exact, _pytree.tree_map(in_float64, given), loss, backward)
        rows = rows_of(device_calls, exact_calls, on_tpu, exact, pristine)
    return Comparison(rows, tolerance)


def _compare_emulated(
    emulate: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    backward: bool,
    tolerance: float,
) -> Comparison:
    """Compare the CPU, with the products of a TPU, with the CPU in float64."""
    if emulate not in EPSILONS:
        valid = ", ".join(map(repr, EPSILONS))
        raise ValueError(f"torch.tpu.compare: emulate is {emulate!r}, and may be {valid} or None.")
    if torch.is_autocast_enabled("tpu"):
        raise ValueError(
            "torch.tpu.compare: emulate= is about float32 products, and autocast is in force. "
            "Leave one of them out."
        )
    emulated = copy.deepcopy(module).to("cpu")
    exact = in_float64(copy.deepcopy(emulated))
    pristine = copy.deepcopy(exact)
    given = (args, dict(kwargs or {}))
    before = torch.random.get_rng_state()
    with tpu_products(emulate) as products:
        on_host = _pytree.tree_map(on_cpu, given)
        emulated_calls = _run(emulated, on_host, loss, backward, products)
    _require_no_draws(torch.equal(before, torch.random.get_rng_state()))
    with float64():
        exact_calls = _run(exact, _pytree.tree_map(in_float64, given), loss, backward)
        rows = rows_of(emulated_calls, exact_calls, emulated, exact, pristine)
    return Comparison(rows, tolerance)


def _require_no_draws(are_none: bool) -> None:
    if not are_none:
        raise ValueError(
            "torch.tpu.compare: the module draws random numbers, and the CPU draws others. Compare "
            "in eval() mode, or set the probabilities of its dropout to 0."
        )


def _run(
    module: nn.Module,
    given: tuple[Any, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    backward: bool,
    products: TpuProducts | None = None,
) -> RecordedCalls:
    args, kwargs = given
    module.zero_grad()
    # Each layer's inputs are read, on purpose.
    quiet = override(performance_warnings=False)
    with quiet, recorded(module, products) as calls, torch.set_grad_enabled(backward):
        output = module(*args, **kwargs)
        if backward:
            scalar = loss(output) if loss is not None else _scalar(output)
            if scalar is not None:
                scalar.backward()
    calls.settle()
    return calls


def _scalar(output: Any) -> torch.Tensor | None:
    """A loss of any output, the same function on the device and in float64."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    generator = torch.Generator().manual_seed(0)
    parts = []
    for t in _pytree.tree_leaves(output):
        if differentiable(t):
            # Exact in all dtypes.
            weights = torch.randint(-4, 5, t.shape, generator=generator, device="cpu")
            parts.append((t * weights.to(t.device, t.dtype)).sum())
    return torch.stack([p.to(parts[0].dtype) for p in parts]).sum() if parts else None

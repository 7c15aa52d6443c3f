"""Errors of layers: each computed again in float64 from what the device gave it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpu_core.comparison.layers import Call, RecordedCalls
from tpu_core.comparison.trees import exactly, mapped, tensors
from tpu_core.report.tables import Table

logger = logging.getLogger("tpu_core")


@dataclass(frozen=True)
class Row:
    """Errors of one result or gradient.

    Attributes:
        layer: Qualified name of the submodule; empty for the module itself.
        kind: Its class.
        what: ``"output"``, ``"gradient of input"`` or ``"gradient of <parameter>"``.
        dtype, shape: Of the device's tensor.
        absolute: Largest difference from the float64 run of the whole module.
        accumulated: L2 norm of that difference, relative to the L2 norm of the result.
        own: The same for this layer alone, from the device's own inputs; None where it could not
            run alone.
        units: The own error in roundings: of the result, or, where that is more, of what the layer
            computes it from (a sum may cancel). The rounding is that of the coarsest dtype within
            the layer.
        finite: Whether all that the layer was given is finite.
    """

    layer: str
    kind: str
    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    absolute: float
    accumulated: float
    own: float | None
    units: float | None
    finite: bool


@dataclass(frozen=True)
class Comparison:
    """Rows of a comparison: results in the order of the forward pass, then gradients backwards."""

    rows: list[Row]
    tolerance: float

    @property
    def outside(self) -> list[Row]:
        """Rows whose own error exceeds the tolerance."""
        return [r for r in self.rows if r.units is not None and not r.units <= self.tolerance]

    @property
    def first(self) -> Row | None:
        """The first row outside of the tolerance; what a layer is made of comes before it.

        Layers that were given NaNs or infinities count only where no other is outside.
        """
        outside = self.outside
        return next((r for r in outside if r.finite), next(iter(outside), None))

    def table(self) -> Table:
        """All rows, those outside of the tolerance marked."""
        columns = ("layer", "what", "dtype", "absolute", "accumulated", "own", "units", "")
        outside = set(map(id, self.outside))
        contents = [
            (
                f"{r.layer or '(all)'} {r.kind}",
                r.what,
                f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}",
                f"{r.absolute:.2e}",
                f"{r.accumulated:.2e}",
                "" if r.own is None else f"{r.own:.2e}",
                "" if r.units is None else f"{r.units:.3g}",
                "<--" if id(r) in outside else "",
            )
            for r in self.rows
        ]
        return Table("Layers beside the CPU in float64", columns, contents)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}"

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(self.table(), self.summary())

    def summary(self) -> str:
        """One sentence: the first row outside of the tolerance, or the largest own error."""
        first = self.first
        if first is not None:
            return (
                f"First outside of the tolerance of {self.tolerance:g} units: the {first.what} of "
                f"{first.layer or 'the module'} ({first.kind}), {first.units:.3g} units."
            )
        largest = max((r for r in self.rows if r.units is not None), key=_units, default=None)
        if largest is None:
            return "There is nothing to compare."
        return (
            f"All within {self.tolerance:g} units. The largest error of a layer is "
            f"{largest.units:.3g} units: the {largest.what} of {largest.layer or 'the module'} "
            f"({largest.kind})."
        )


def _units(row: Row) -> float:
    return row.units or 0.0


def rows_of(
    device: RecordedCalls,
    exact: RecordedCalls,
    on_tpu: nn.Module,
    reference: nn.Module,
    pristine: nn.Module,
) -> list[Row]:
    """Rows of two runs of a module.

    Args:
        device, exact: RecordedCalls of its submodules on the device and in float64.
        on_tpu, reference: The modules that ran, with gradients of their parameters.
        pristine: A copy in float64 that did not run.

    Raises:
        ValueError: The runs called other submodules: control flow depends on values that differ.
    """
    names, others = ([c.name for c in calls.ended] for calls in (device, exact))
    if names != others:
        raise ValueError(
            "torch.tpu.compare: the module calls other submodules in float64 than on the device: "
            "its control flow depends on values that differ."
        )
    modules = dict(pristine.named_modules())
    count = Counter(names)
    forward: list[Row] = []
    # Last to start, first to receive a gradient; what a layer is made of starts after it.
    backward: dict[int, list[Row]] = {}
    parameters = _gradients(reference)
    found_parameters = _gradients(on_tpu)
    for mine, theirs in zip(device.ended, exact.ended, strict=True):
        alone = _alone(modules[mine.name], mine, mine.epsilon)
        forward += _outputs(mine, theirs, alone)
        gradients = backward[-mine.started] = list(_input_gradients(mine, theirs, alone))
        if count[mine.name] > 1:
            continue
        for name, p in mine.module.named_parameters(recurse=False):
            full = f"{mine.name}.{name}" if mine.name else name
            if full in parameters and full in found_parameters:
                own = _Own.of(alone, _parameter(name))
                got, want = found_parameters[full], parameters[full]
                gradients.append(_row(mine, f"gradient of {name}", p.dtype, got, want, own))
    return [*forward, *(row for i in sorted(backward) for row in backward[i])]


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: exactly(p.grad) for n, p in module.named_parameters() if p.grad is not None}


@dataclass
class _Results:
    """Results of a layer in float64, from the device's inputs and output gradients."""

    outputs: list[torch.Tensor]
    inputs: dict[int, torch.Tensor]
    parameters: dict[str, torch.Tensor]


@dataclass
class _Alone:
    """A layer by itself in float64: exactly, and from values that are off by a rounding.

    The second shows how much of a difference rounding explains, in a sum that cancels for example.
    """

    exact: _Results
    rounded: _Results
    epsilon: float


def _alone(module: nn.Module, call: Call, epsilon: float) -> _Alone | None:
    generator = torch.Generator().manual_seed(0)

    def off(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            return t
        noise = torch.rand(t.shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
        return t * (1 + epsilon * noise)

    parameters = [p for p in module.parameters() if p.is_floating_point()]
    kept = [p.detach().clone() for p in parameters]
    try:
        exact = _results(module, call, lambda t: t)
        with torch.no_grad():
            for p in parameters:
                p.copy_(off(p))
        rounded = _results(module, call, off)
    except Exception as error:  # such as a cache that the first call has filled
        logger.debug("compare: %s does not run alone: %s", call.name, error)
        return None
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
    return _Alone(exact, rounded, epsilon)


def _results(
    module: nn.Module, call: Call, change: Callable[[torch.Tensor], torch.Tensor]
) -> _Results:
    given = mapped(lambda t: change(t.detach()), (call.args, call.kwargs))
    leaves = tensors(given)
    for i in call.input_gradients:
        leaves[i].requires_grad_()
    with torch.set_grad_enabled(bool(call.output_gradients)):
        # Copies, as a layer may write into its inputs.
        args, kwargs = mapped(torch.clone, given)
        outputs = tensors(module(*args, **kwargs))
    if len(outputs) != len(call.outputs):
        raise ValueError(f"{len(outputs)} results in place of {len(call.outputs)}")
    roots = {i: change(g) for i, g in call.output_gradients.items() if outputs[i].requires_grad}
    inputs, parameters = _differentiated(module, call, leaves, outputs, roots)
    return _Results([o.detach() for o in outputs], inputs, parameters)


def _differentiated(
    module: nn.Module,
    call: Call,
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    roots: dict[int, torch.Tensor],
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of the tensor arguments, by position, and of the layer's own parameters."""
    if not roots:
        return {}, {}
    positions = list(call.input_gradients)
    parameters = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
    wanted = [*(given[i] for i in positions), *parameters.values()]
    if not wanted:
        return {}, {}
    found = torch.autograd.grad(
        [outputs[i] for i in roots],
        wanted,
        [g.to(outputs[i].dtype) for i, g in roots.items()],
        allow_unused=True,
    )
    keys = [*positions, *parameters]
    made = {k: g for k, g in zip(keys, found) if g is not None}
    inputs = {k: g for k, g in made.items() if isinstance(k, int)}
    return inputs, {k: g for k, g in made.items() if isinstance(k, str)}


def _outputs(mine: Call, theirs: Call, alone: _Alone | None) -> Iterator[Row]:
    several = len(mine.outputs) > 1
    for i, (got, want) in enumerate(zip(mine.outputs, theirs.outputs)):
        what = f"output {i}" if several else "output"
        own = _Own.of(alone, _output(i))
        yield _row(mine, what, mine.dtypes[i], got, want, own)


def _input_gradients(mine: Call, theirs: Call, alone: _Alone | None) -> Iterator[Row]:
    several = len(mine.input_gradients) > 1
    for i, got in sorted(mine.input_gradients.items()):
        if i not in theirs.input_gradients:
            continue
        what = f"gradient of input {i}" if several else "gradient of input"
        own = _Own.of(alone, _input(i))
        yield _row(mine, what, mine.input_dtypes[i], got, theirs.input_gradients[i], own)


@dataclass
class _Own:
    """One tensor of `_Alone`."""

    exact: torch.Tensor
    rounded: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, alone: _Alone | None, pick: _Pick) -> _Own | None:
        if alone is None:
            return None
        exact, rounded = pick(alone.exact), pick(alone.rounded)
        if exact is None or rounded is None or exact.shape != rounded.shape:
            return None
        return cls(exact, rounded, alone.epsilon)

    def units(self, got: torch.Tensor) -> float:
        """Error of ``got`` in roundings: of the result, or of what it was computed from."""
        if not (got.is_floating_point() or got.is_complex()):
            sure = self.exact == self.rounded
            return math.inf if (sure & (got != self.exact)).any() else 0.0
        error = _difference(got, self.exact).norm().item()
        rounding = _difference(self.rounded, self.exact).norm().item()
        one = max(self.epsilon * _finite_norm(self.exact), rounding)
        return 0.0 if error == 0 else error / one if one and math.isfinite(error) else math.inf


_Pick = Callable[[_Results], torch.Tensor | None]


def _output(i: int) -> _Pick:
    return lambda r: r.outputs[i]


def _input(i: int) -> _Pick:
    return lambda r: r.inputs.get(i)


def _parameter(name: str) -> _Pick:
    return lambda r: r.parameters.get(name)


def _row(
    call: Call,
    what: str,
    dtype: torch.dtype,
    got: torch.Tensor,
    want: torch.Tensor,
    own: _Own | None,
) -> Row:
    absolute, accumulated = _errors(got, want)
    alone = units = None
    if own is not None and own.exact.shape == got.shape:
        alone, units = _errors(got, own.exact)[1], own.units(got)
    finite = all(bool(t.isfinite().all()) for t in tensors((call.args, call.kwargs)))
    if what.startswith("gradient"):
        finite &= all(bool(g.isfinite().all()) for g in call.output_gradients.values())
    kind = type(call.module).__name__
    shape = tuple(got.shape)
    return Row(call.name, kind, what, dtype, shape, absolute, accumulated, alone, units, finite)


def _difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Absolute differences; NaNs, and infinities of one sign, are equal to each other."""
    if not got.is_complex():
        got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0, got - want).abs()


def _finite_norm(t: torch.Tensor) -> float:
    t = t if t.is_complex() else t.double()
    return torch.where(t.isfinite(), t, 0).norm().item()


def _errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Largest absolute difference, and the relative error in the L2 norm; both may be infinite."""
    if got.shape != want.shape:
        return math.inf, math.inf
    if got.numel() == 0:
        return 0.0, 0.0
    difference = _difference(got, want)
    if not difference.isfinite().all():
        return math.inf, math.inf
    norm, scale = difference.norm().item(), _finite_norm(want)
    return difference.max().item(), 0.0 if norm == 0 else norm / scale if scale else math.inf

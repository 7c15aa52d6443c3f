"""A program's steps once more on the CPU, from the state that the device had, and the judgement.

Rounding grows from step to step, so the CPU takes the device's state every few steps. Where the
results differ still, the CPU repeats the steps from states changed by some units of the last place,
and in float64: what these change by themselves (ties, kinks) is not counted as a difference.

Adam and its like turn a gradient that is 0 but for rounding into a step of full length. So the CPU
compares each step's gradients with its own, and updates with those that the device had: gradients
and parameters are each judged by what they were computed from.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .programs_model import Spec, Step, backward_and_update, batch, build, loss_of, optimizer

Gradients = dict[str, Tensor]

REPEATS = 4
# Of the largest change among the repeats, which are few.
FACTOR = 10.0


@dataclass
class State:
    """Parameters, buffers, gradients and the optimizer's state, on the CPU."""

    model: dict[str, Tensor]
    optim: dict[str, Any]
    grads: dict[str, Tensor | None]


def to_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {k: to_cpu(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(to_cpu, tree))
    return copy.deepcopy(tree)


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> State:
    grads = {k: to_cpu(p.grad) for k, p in model.named_parameters()}
    return State(to_cpu(model.state_dict()), to_cpu(optim.state_dict()), grads)


def gradients_of(spec: Spec, model: nn.Module) -> Gradients | None:
    """The gradients that an update used, not copied; None of SGD, which writes to them."""
    if spec["optimizer"]["name"] == "SGD":
        return None
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def changed(tree: Any, eps: float, g: torch.Generator) -> Any:
    if isinstance(tree, Tensor) and tree.is_floating_point() and tree.dim():
        return tree * (1 + eps * torch.randn(tree.shape, generator=g, dtype=tree.dtype))
    if isinstance(tree, dict):
        return {k: changed(v, eps, g) for k, v in tree.items()}
    return tree


def repeat(
    spec: Spec,
    state: State,
    steps: list[Step],
    variant: int = 0,
    used: list[Gradients | None] | None = None,
) -> dict[str, Tensor]:
    """Losses; gradients, parameters and buffers at the end; gradients of steps in ``used``.

    Args:
        spec: The program.
        state: Before the first step.
        steps: The steps.
        variant: 0 as it is, 1 in float64, else with noise.
        used: For each step, the gradients to update with in place of its own.
    """
    model = build(spec)
    wide = variant == 1 and not spec["autocast"]
    g = torch.Generator().manual_seed(variant)
    if variant > 1:
        # A rounding an op, and some tens of ops.
        eps = 2.0**-9 if spec["autocast"] else 2.0**-21
        optim_state = {**state.optim, "state": changed(state.optim["state"], eps, g)}
        state = State(changed(state.model, eps, g), optim_state, changed(state.grads, eps, g))
    if wide:
        model.double()
    model.load_state_dict(state.model)
    optim = optimizer(spec, model)
    optim.load_state_dict(copy.deepcopy(state.optim))
    for k, p in model.named_parameters():
        grad = state.grads[k]
        p.grad = None if grad is None else grad.to(p.dtype).clone()
    found: dict[str, Tensor] = {}

    def exchange(*_: Any) -> None:
        given = used[i] if used else None
        for k, p in model.named_parameters():
            if given is not None and p.grad is not None:
                found[f"gradient@{i} {k}"] = p.grad
                if k in given:
                    p.grad = given[k].to(p.dtype, copy=True)

    optim.register_step_pre_hook(exchange)
    for i, step in enumerate(steps):
        if step["zeroes"]:
            optim.zero_grad(set_to_none=step["to_none"])
        data = batch(spec, step)
        if wide:
            data["features"] = data["features"].double()
        loss = loss_of(model, spec, data)
        backward_and_update(loss, model, optim, spec, step)
        found[f"loss {i}"] = loss.detach()
    return found | results(state_of(model, optim))


def results(state: State, used: list[Gradients | None] | None = None) -> dict[str, Tensor]:
    """What `repeat` gives but losses."""
    found = {f"gradient {k}": g for k, g in state.grads.items() if g is not None}
    for i, grads in enumerate(used or []):
        found |= {f"gradient@{i} {k}": g for k, g in (grads or {}).items()}
    return found | {f"state {k}": v for k, v in state.model.items()}


def largest(x: Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def base_tolerances(spec: Spec, want: dict[str, Tensor], state: State) -> dict[str, float]:
    """Relative to the largest element: XLA orders sums in its own way."""
    loose = 40.0 if spec["autocast"] else 1.0
    tops: dict[str, float] = {}  # of each step's gradients
    for k, v in want.items():
        kind = k.split(" ")[0]
        tops[kind] = max(tops.get(kind, 0.0), largest(v))
    found = {}
    for k, v in want.items():
        kind, name = k.split(" ", 1)
        if kind == "loss":
            found[k] = loose * (1e-4 * largest(v) + 1e-6)
        elif kind.startswith("gradient"):
            found[k] = loose * (1e-3 * largest(v) + 1e-5 * tops[kind])
        else:  # what a step adds, not what was there before
            added = largest(v.double() - state.model[name].double())
            found[k] = loose * 2e-3 * added + 1e-6 * largest(v)
    return found


def differences(
    spec: Spec,
    state: State,
    steps: list[Step],
    got: dict[str, Tensor],
    used: list[Gradients | None] | None = None,
) -> list[tuple[str, str]]:
    """What of the device's results is wrong: names, and texts for a person."""
    want = repeat(spec, state, steps, 0, used)
    # Where the CPU's numbers are not finite the device's must be the same.
    tolerances = {
        k: t if math.isfinite(t) else 0.0 for k, t in base_tolerances(spec, want, state).items()
    }
    wrong = [("missing", k) for k in want if k not in got]
    far = {}
    for k, v in want.items():
        if k not in got:
            continue
        if (got[k].dtype, got[k].shape) != (v.dtype, v.shape):
            wrong.append((k, f"{k}: {got[k].dtype} {got[k].shape}, CPU {v.dtype} {v.shape}"))
        elif not (d := distance(got[k], v)) <= tolerances[k]:
            far[k] = d
    if far:
        others = [repeat(spec, state, steps, n, used) for n in range(1, REPEATS + 1)]
        for k, d in far.items():
            own = max(distance(o[k], want[k]) for o in others)
            if not d <= tolerances[k] + FACTOR * own:
                text = f"{k}: differs by {d:.3g}, allowed {tolerances[k]:.3g}, noise {own:.3g}"
                wrong.append((k, f"{text}\n  tpu {few(got[k])}\n  CPU {few(want[k])}"))
    return wrong


def few(x: Tensor) -> list[float]:
    return [round(float(v), 6) for v in x.flatten()[:6]]


def distance(x: Tensor, y: Tensor) -> float:
    """Largest difference; NaN and infinities are equal to themselves alone."""
    x, y = x.detach().double(), y.detach().double()
    d = (x - y).abs()
    d = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, d)
    return float(d.nan_to_num(nan=float("inf")).max()) if d.numel() else 0.0

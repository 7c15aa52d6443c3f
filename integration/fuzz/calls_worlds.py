"""One side of a case of ``calls``: the tensors on one device, and what calls of functions give."""

from __future__ import annotations

import re
from typing import Any

import torch

from .values import decoded, made, text_of

Call = dict[str, Any]
# What is done with each floating result: a later op in the same program. Of "either", both are
# recorded and a call says which is kept: the result, what was made of it, or both.
AFTER = {
    "double": "t + t",
    "sum": "t.sum(-1) if t.dim() else t * 2",
    "either": "t + 1",
    "none": "t",
}


class Outcome:
    """What a call gave: a result, what it wrote, gradients; or an error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.result: Any = None
        self.written: list[torch.Tensor] = []
        self.gradients: Any = None
        self.dtypes: set[torch.dtype] = set()


class World:
    """The tensors of a case on one device; equal descriptions are one tensor."""

    def __init__(self, device: str, data: dict[str, Any]) -> None:
        self._device = device
        self._data = data
        self._made: dict[str, torch.Tensor] = {}

    def _tensor(self, spec: dict[str, Any]) -> torch.Tensor:
        text = text_of(spec)
        if text not in self._made:
            t = made(spec, self._device)
            if self._data["via"] == "clone":
                t = t.clone()
            self._made[text] = t
        return self._made[text]

    def _leaf(self, spec: dict[str, Any]) -> torch.Tensor:
        t = self._tensor(spec)
        if t.dtype.is_floating_point or t.dtype.is_complex:
            return t.detach().requires_grad_()
        return t

    def call(self, call: Call) -> Outcome:
        """Call the function on this device's tensors."""
        outcome = Outcome()
        used: dict[str, torch.Tensor] = {}
        grad = self._data.get("grad", False)

        def make(spec: dict[str, Any]) -> torch.Tensor:
            text = text_of(spec)
            if text not in used:
                used[text] = self._leaf(spec) if grad else self._tensor(spec)
            return used[text]

        try:
            args = [decoded(a, self._device, make) for a in call["args"]]
            kwargs = {k: decoded(v, self._device, make) for k, v in call["kwargs"].items()}
            outcome.dtypes = {t.dtype for t in used.values()}
            result = function(call["fn"])(*args, **kwargs)
            then = function(f"lambda t: {AFTER[self._data['after']]}")
            outcome.result = after(result, then)
            if self._data["after"] == "either":
                kept = (result, outcome.result, [result, outcome.result])
                outcome.result = kept[call.get("keep", 0)]
            if grad:
                outcome.gradients = gradients(result, list(used.values()))
            if writes(call):
                outcome.written = list(used.values())
        except Exception as error:
            outcome.error = error
        return outcome


_functions: dict[str, Any] = {}


def function(text: str) -> Any:
    """The function that a source text names."""
    if text not in _functions:
        names = {"torch": torch, "F": torch.nn.functional}
        _functions[text] = eval(text, names)
    return _functions[text]


def after(result: Any, then: Any) -> Any:
    """The result with an op applied to each floating tensor."""
    if isinstance(result, torch.Tensor) and result.dtype.is_floating_point:
        return then(result)
    if isinstance(result, (tuple, list)):
        return [after(r, then) for r in result]
    return result


def gradients(result: Any, leaves: list[torch.Tensor]) -> Any:
    """Gradients of a weighted sum of the differentiable results."""
    flat: list[torch.Tensor] = []

    def collect(r: Any) -> None:
        if isinstance(r, torch.Tensor) and r.requires_grad:
            flat.append(r)
        elif isinstance(r, (tuple, list)):
            for x in r:
                collect(x)

    collect(result)
    wanted = [t for t in leaves if t.requires_grad]
    if not flat or not wanted:
        return None
    weights = [
        (torch.arange(r.numel()) % 5 - 1).reshape(r.shape).to(r.dtype).to(r.device) for r in flat
    ]
    return torch.autograd.grad(flat, wanted, weights, allow_unused=True)


def name_of(call: Call) -> str:
    """A function's short name, which findings are counted by."""
    if "name" in call:
        return f"composition {call['name']}"
    return call["fn"].removeprefix("torch.").removeprefix("ops.")


def writes(call: Call) -> bool:
    """Whether the function writes to its arguments."""
    fn = call["fn"]
    return fn.split(".")[-1].endswith("_") or bool(re.search(r"aten\.\w+_\.", fn)) or "out" in fn

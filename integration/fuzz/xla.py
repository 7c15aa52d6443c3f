"""Random computations that XLA fuses, against PyTorch's CPU: it looks for wrong numbers of XLA."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .cases import Case, Failure
from .xla_draw import draw
from .xla_ops import Tensor
from .xla_program import (
    HEADER,
    Program,
    differentiable,
    input_text,
    inputs_of,
    make_input,
    program_text,
    pruned,
    reference,
)
from .xla_reference import FACTOR, NOISY, Value, widen
from .xla_smaller import smaller

# For gradients: their own ops are not noisy, and some sum to 0 but for rounding.
SLACK = 8.0


class Xla:
    """Random fused computations."""

    name = "xla"
    seconds_a_case = 150.0  # the first of a process starts the device
    cases_a_process = 150

    def start(self) -> None:
        warnings.simplefilter("ignore")

    def draw(self, rng: random.Random) -> Case:
        warnings.simplefilter("ignore")
        return Case("xla", draw(rng))

    def run(self, case: Case) -> Failure | None:
        data = case.data
        try:
            values = reference(data)
            wanted = [values[i] for i in data["outputs"]]
            want_grads = gradients([x for x in wanted if x], values, data)
        except Exception:
            return None  # of a smaller program that the CPU refuses
        program = compiled(data)
        leaves = [i for i in inputs_of(data) if differentiable(data, data["nodes"][i])]
        try:
            made = {i: make_input(data["nodes"][i]).to("tpu") for i in inputs_of(data)}
            for i in leaves:
                made[i].requires_grad_()
            outs = program(*made.values())
            grads = []
            if want_grads is not None:
                alive = [o for o, w in zip(outs, wanted) if w and w.v.requires_grad]
                grads = torch.autograd.grad(
                    [o.sum() for o in alive], [made[i] for i in leaves], allow_unused=True
                )
            outs = [o.detach().cpu() for o in outs]
            grads = [None if x is None else x.cpu() for x in grads]
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            text = "".join(c for c in "".join(first) if not c.isdigit())[:60]
            return Failure("error", f"{type(error).__name__}: {text}", str(error)[:2000])
        for i, got, want in zip(data["outputs"], outs, wanted):
            if want is not None and (failure := compare(key_of(data, i), got, want)):
                return failure
        for i, got, want in zip(leaves, grads, want_grads or ()):
            if failure := compare(f"gradient of input {i}", got, want, SLACK):
                return failure
        return None

    def shrink(self, case: Case) -> Iterator[Case]:
        for data in smaller(case.data):
            yield Case("xla", pruned(data))

    def source(self, case: Case) -> str:
        data = case.data
        names = inputs_of(data)
        lines = [HEADER, program_text(data), ""]
        lines += [f"v{i} = {input_text(data['nodes'][i])}" for i in names]
        if data["how"] != "eager":
            lines.append(f"compiled = torch.compile(program, dynamic={data['how'] == 'dynamic'})")
        function = "program" if data["how"] == "eager" else "compiled"
        leaves = [i for i in names if differentiable(data, data["nodes"][i])]
        lines += [f"v{i}.requires_grad_()" for i in leaves]
        on_device = ", ".join(f"v{i}.to('tpu')" for i in names)
        lines += [
            f"got = {function}({on_device})",
            f"want = program({', '.join(f'v{i}' for i in names)})",
        ]
        lines.append(
            "for g, w in zip(got, want):\n"
            "    print(g.cpu().flatten()[:8], w.flatten()[:8], (g.cpu() != w).sum())"
        )
        return "\n".join(lines)


def key_of(data: Program, i: int) -> str:
    return data["nodes"][i].get("op", "input")


def compiled(data: Program) -> Any:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(program_text(data), scope)
    if data["how"] == "eager":
        return scope["program"]
    torch._dynamo.reset()
    return torch.compile(scope["program"], dynamic=data["how"] == "dynamic")


def gradients(outs: list[Value], values: list[Value | None], data: Program) -> list[Value] | None:
    """Gradients of the sum of what has one; None where there is nothing to differentiate."""
    nodes = zip(data["nodes"], values)
    leaves = [v.v for n, v in nodes if v is not None and differentiable(data, n)]
    alive = [o for o in outs if o.v.requires_grad]
    if not data["grad"] or not leaves or not alive:
        return None

    def grads(sums: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(sums, leaves, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves)]

    own = grads([o.v.sum() for o in alive])
    wide = [grads([o.widened(k).sum() for o in alive]) for k in range(NOISY + 1)]
    return [Value(g, False, [widen(w[i]) for w in wide]) for i, g in enumerate(own)]


def compare(key: str, got: Tensor | None, want: Value, slack: float = 1.0) -> Failure | None:
    v = want.v.detach()
    if got is None:
        got = torch.zeros_like(v)
    if got.dtype != v.dtype:
        return Failure("dtype", key, f"{got.dtype}, CPU {v.dtype}")
    if got.shape != v.shape:
        return Failure("shape", key, f"{got.shape}, CPU {v.shape}")
    if want.same:
        different = ~((got == v) | ((got != got) & (v != v)))
        if not different.any():
            return None
        tolerance = 0.0
    else:
        exact = want.wide[0].detach()
        tolerance = want.tolerance() + FACTOR * torch.finfo(v.dtype).eps * float(
            exact.abs().max() if exact.numel() else 0
        )
        tolerance *= slack
        if not tolerance < float("inf"):
            return None
        different = ~((widen(got) - exact).abs() <= tolerance)
        if not different.any():
            return None
        v = exact
    where = different.nonzero()[0].tolist() if v.dim() else []
    return Failure(
        "value",
        key,
        f"{int(different.sum())} of {v.numel()} elements differ by more than {tolerance:.3g}; "
        f"at {where} {got[tuple(where)].item()}, CPU {v[tuple(where)].item()}",
    )

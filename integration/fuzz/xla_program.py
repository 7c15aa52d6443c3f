"""A program of the fuzzer ``xla``: inputs, one op a node, outputs; its text and its reference."""

from __future__ import annotations

from typing import Any

import torch

from . import xla_arrays, xla_indices, xla_pointwise, xla_products  # noqa: F401 (their ops)
from .xla_ops import OPS, Tensor
from .xla_reference import Unknown, Value, result

Node = dict[str, Any]
Program = dict[str, Any]
HEADER = """import torch, torch.nn.functional as F

def ints(shape, dtype, lo, hi, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(lo, hi + 1, shape, generator=g)
    if dtype.is_complex:
        y = torch.randint(lo, hi + 1, shape, generator=g)
        return torch.complex(x.double(), y.double()).to(dtype)
    return x.to(dtype)

def reals(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
"""
_scope: dict[str, Any] = {}
exec(HEADER, _scope)


def input_text(n: Node) -> str:
    dtype = f"torch.{n['dtype']}"
    if n["input"] == "reals":
        text = f"reals({n['shape']}, {dtype}, {n['seed']})"
    else:
        text = f"ints({n['shape']}, {dtype}, {n['lo']}, {n['hi']}, {n['seed']})"
    if n.get("swapped"):  # other strides, equal values
        text += ".mT.contiguous().mT"
    return text


def make_input(n: Node) -> Tensor:
    made: Tensor = eval(input_text(n), {"torch": torch, **_scope})
    return made


def inputs_of(data: Program) -> list[int]:
    return [i for i, n in enumerate(data["nodes"]) if "input" in n]


def program_text(data: Program) -> str:
    nodes = data["nodes"]
    lines = [f"def program({', '.join(f'v{i}' for i in inputs_of(data))}):"]
    for i, n in enumerate(nodes):
        if "op" in n:
            lines.append(
                f"    v{i} = " + OPS[n["op"]].text([f"v{k}" for k in n["of"]], n["params"])
            )
    return "\n".join([*lines, f"    return [{', '.join(f'v{i}' for i in data['outputs'])}]"])


def reference(data: Program) -> list[Value | None]:
    """Values of all nodes; None where there is no right one."""
    values: list[Value | None] = []
    for i, n in enumerate(data["nodes"]):
        if "input" in n:
            x = make_input(n)
            value: Value | None = Value(x.requires_grad_() if differentiable(data, n) else x, True)
        else:
            operands = [values[k] for k in n["of"]]
            try:
                value = None if None in operands else result(n["op"], operands, n["params"], i)
            except Unknown:
                value = None
        values.append(value)
    return values


def differentiable(data: Program, n: Node) -> bool:
    return bool(data["grad"] and "input" in n and n["dtype"] in ("float32", "float64"))


def pruned(data: Program) -> dict[str, Any]:
    """Without nodes that no output needs."""
    needed = set(data["outputs"])
    for i in reversed(range(len(data["nodes"]))):
        if i in needed:
            needed.update(data["nodes"][i].get("of", ()))
    names = {old: new for new, old in enumerate(sorted(needed))}
    nodes = []
    for old in sorted(needed):
        n = dict(data["nodes"][old])
        if "of" in n:
            n["of"] = [names[k] for k in n["of"]]
        nodes.append(n)
    return {**data, "nodes": nodes, "outputs": [names[i] for i in data["outputs"]]}

"""Smaller programs of the fuzzer ``xla``."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from .minimise import smaller_numbers, without_parts
from .xla_program import Program, reference


def smaller(data: Program) -> Iterator[Program]:
    nodes = data["nodes"]
    if len(data["outputs"]) > 1:
        for outputs in without_parts(data["outputs"], 1):
            yield {**data, "outputs": outputs}
    if data["grad"]:
        yield {**data, "grad": False}
    if data["how"] != "eager":
        yield {**data, "how": "eager"}
    try:
        values = reference(data)
    except Exception:
        values = [None] * len(nodes)
    for i, n in reversed([*enumerate(nodes)]):
        x = values[i]
        if "op" not in n or x is None or i in data["outputs"]:
            continue
        for k in n["of"]:  # an operand in its place
            y = values[k]
            if y is not None and (y.v.shape, y.v.dtype) == (x.v.shape, x.v.dtype):
                swapped = copy.deepcopy(data)
                for m in swapped["nodes"][i + 1 :]:
                    m["of"] = [k if j == i else j for j in m.get("of", ())] if "of" in m else []
                    if "input" in m:
                        del m["of"]
                yield swapped
        low, high = (0, 1) if x.v.dtype in (torch.bool, torch.uint8) else (-4, 4)
        fresh = {
            "input": "ints",
            "shape": [*x.v.shape],
            "dtype": str(x.v.dtype).removeprefix("torch."),
        }
        yield {
            **data,
            "nodes": [*nodes[:i], {**fresh, "lo": low, "hi": high, "seed": 1}, *nodes[i + 1 :]],
        }
    for n in sorted({s for m in nodes for s in m.get("shape", ()) if s > 1}, reverse=True):
        for to in smaller_numbers(n, 1):
            changed = copy.deepcopy(data)
            for m in changed["nodes"]:
                if "shape" in m:
                    m["shape"] = [to if s == n else s for s in m["shape"]]
            yield changed
    for i, m in enumerate(nodes):
        if m.get("swapped"):
            plain = {k: v for k, v in m.items() if k != "swapped"}
            yield {**data, "nodes": [*nodes[:i], plain, *nodes[i + 1 :]]}

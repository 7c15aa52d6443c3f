"""Keys of graphs: what programs on disk know them by, the same in every process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile import recomputation
from tpu_compile.fx_utils import subgraph
from tpu_compile.rng import NUMBER
from tpu_compile.sizes import Symbols
from tpu_core.extend import copy_to_jax, package_digest


def key_of(module: GraphModule, symbols: Symbols | None = None) -> str:
    """Hash of nodes, arguments, geometry and constants, and of what evaluates them.

    Args:
        module: The graph.
        symbols: Its open sizes; none unless given.
    """
    symbols = symbols or Symbols([], [])
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    # Their own numbers count up in a process.
    checkpoints = {n: str(i) for i, r in enumerate(recomputation.find(module)) for n in r.nodes}
    # Programs stay in the cache folder: they must not outlive a change of this package.
    digest = hashlib.sha256(package_digest("tpu_compile").encode())
    # Buckets go by the ranges of sizes.
    digest.update(repr([(s.low, s.high, s.varies) for s in symbols.open]).encode())

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(text, value))}]"
        if isinstance(value, torch.Tensor):
            shape, strides = (text(tuple(n)) for n in (value.shape, value.stride()))
            return f"{value.dtype}{shape}{strides}{value.device.type}"
        return symbols.text(value)

    for node in module.graph.nodes:
        parts = [node.op, str(node.target) if node.op == "call_function" else ""]
        parts += [text(a) for a in node.args]
        parts += [f"{k}={text(v)}" for k, v in sorted(node.kwargs.items())]
        parts.append(text(node.meta.get("val")))
        parts += [str(node.meta.get(NUMBER, "")), checkpoints.get(node, "")]
        digest.update("|".join(parts).encode() + b"\n")
        body = subgraph(node)
        if body is not None:
            digest.update(key_of(body, symbols).encode())
        elif node.op == "get_attr":
            constant = getattr(module, str(node.target))
            digest.update(copy_to_jax(constant).tobytes() if constant.numel() else b"")
    return digest.hexdigest()

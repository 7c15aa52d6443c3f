"""Losses in the graphs of Dynamo; see `tpu_compile.linear_loss`."""

from __future__ import annotations

import logging
from dataclasses import astuple, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import line_of
from tpu_compile.linear_loss import Logits, after, call_of, from_linear, verdict, without_logits
from tpu_core.extend import KernelSelection

logger = logging.getLogger("tpu_compile")


def leave_out_logits(module: GraphModule) -> None:
    """Have the losses of a graph computed without logits that nothing else reads.

    Args:
        module: A graph of Dynamo's; it is changed.
    """
    if not any(node.target is F.cross_entropy for node in module.graph.nodes):
        return
    known: dict[Node, Logits] = {}
    for node in list(module.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            known.clear()  # a loss of logits without gradients has none
        elif node.target is F.cross_entropy:
            _replace(node, known)
        elif (found := _logits(node, known)) is not None:
            known[node] = replace(found, chain=(*found.chain, node))
    module.graph.lint()
    module.recompile()


def _logits(node: Node, known: dict[Node, Logits]) -> Logits | None:
    made = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or not isinstance(made, torch.Tensor):
        return None
    if node.target is F.linear:
        weight: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        return from_linear(node.args, node.kwargs, weight.meta["example_value"], made)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or source not in known:
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    before = source.meta["example_value"]
    return after(known[source], name, node.args[1:], before, made)


def _replace(node: Node, known: dict[Node, Logits]) -> None:
    call = call_of(node.args, node.kwargs)
    if call is None:
        _told(node, "it has class weights, or options that are no numbers")
        return
    source, target, options = call
    if source not in known:
        _told(node, "they are no linear layer's, or an op on them is not followed")
        return
    logits = known[source]
    value, made = source.meta["example_value"], node.meta["example_value"]
    reason = verdict(logits, value, target.meta["example_value"])
    if reason is None and any(len(n.users) != 1 for n in logits.chain):
        reason = "something else reads them"
    _told(node, reason)
    if reason is not None:
        logger.info("logits %s are built: %s", list(value.shape), reason)
        return
    given = (logits.hidden, logits.weight, logits.bias, target, logits.steps, logits.dtype)
    node.target = without_logits
    node.args = (*given, made.dtype, *astuple(options), logits.softcap)
    node.kwargs = {}
    for unused in reversed(logits.chain):
        node.graph.erase_node(unused)
    logger.info("logits %s are not built", list(value.shape))


def _told(node: Node, reason: str | None) -> None:
    """For `torch.tpu.compile_report`: whether the logits are built, and why."""
    chosen = "without logits" if reason is None else "with logits"
    KernelSelection("cross_entropy", chosen, reason or "").report(line_of(node))

"""Losses in the graphs of Dynamo; see `tpu_compile.linear_loss`."""

from __future__ import annotations

import logging
from dataclasses import astuple, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.fx import GraphModule, Node

from tpu_compile.fx_utils import line_of
from tpu_compile.linear_loss import (
    Logits,
    after,
    call_of,
    from_linear,
    may_write,
    name_of,
    verdict,
    without_logits,
)
from tpu_core.extend import KernelSelection

logger = logging.getLogger("tpu_compile")
_GRADIENT_MODES = (
    torch._C._set_grad_enabled,
    grad_mode._enter_inference_mode,
    grad_mode._exit_inference_mode,
)


def has_refused_labels(module: GraphModule) -> bool:
    """Return whether a loss of a graph has labels of int32, which fake tensors alone take."""
    for node in module.graph.nodes:
        if node.target in (F.cross_entropy, F.nll_loss):
            target = node.args[1] if len(node.args) > 1 else node.kwargs.get("target")
            if getattr(_value(target), "dtype", None) is torch.int32:
                return True
    return False


def leave_out_logits(module: GraphModule) -> None:
    """Have the losses of a graph computed without logits that nothing else reads.

    Args:
        module: A graph of Dynamo's; it is changed.
    """
    if not any(node.target is F.cross_entropy for node in module.graph.nodes):
        return
    if any(getattr(n.target, "__name__", "") == "_make_dual" for n in module.graph.nodes):
        return  # the loss without logits has no forward derivative
    known: dict[Node, Logits] = {}
    autocast = [torch.is_autocast_enabled("tpu")]
    for node in list(module.graph.nodes):
        if node.target in _GRADIENT_MODES:
            known.clear()  # a loss of logits without gradients has none
        elif node.target is autocast_mode._enter_autocast:
            device, _, enabled, *_ = node.args
            autocast.append(bool(enabled) if device == "tpu" else autocast[-1])
        elif node.target is autocast_mode._exit_autocast:
            autocast.pop()
        elif node.target is F.cross_entropy:
            _replace(node, known)
        elif (found := _logits(node, known, autocast[-1])) is not None:
            known[node] = replace(found, chain=(*found.chain, node))
    module.graph.lint()
    module.recompile()


def _logits(node: Node, known: dict[Node, Logits], casts: bool) -> Logits | None:
    made = _value(node)
    if node.op not in ("call_function", "call_method") or not isinstance(made, torch.Tensor):
        return None
    if node.target is F.linear:
        return from_linear(node.args, node.kwargs, _value, made, casts)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or source not in known:
        return None
    name = name_of(node.target)
    return after(known[source], name, node.args[1:], node.kwargs, _value(source), made)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


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
    value, made = _value(source), _value(node)
    reason = verdict(logits, value, _value(target))
    if reason is None and any(len(n.users) != 1 for n in logits.chain):
        reason = "something else reads them"
    if reason is None and _is_written(logits, node):
        reason = "hidden states, weight or bias may be written before the loss"
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


def _is_written(logits: Logits, loss: Node) -> bool:
    """Return whether what the layer reads may be written between the layer and the loss."""
    sources = [n for n in (logits.hidden, logits.weight, logits.bias) if n is not None]
    storages = {_storage(n) for n in sources}
    node = logits.chain[0].next
    while node is not loss:
        if node.op.startswith("call_") and may_write(node.target, node.args, node.kwargs):
            given = {_storage(n) for n in node.all_input_nodes}
            # None, of a tensor inside of a transform or of no tensor, may be any.
            if given & storages or (given and None in storages):
                return True
        node = node.next
    return False


def _storage(node: Node) -> int | None:
    try:
        return int(_value(node).untyped_storage()._cdata)
    except (AttributeError, NotImplementedError):
        return None


def _told(node: Node, reason: str | None) -> None:
    """For `torch.tpu.compile_report`: whether the logits are built, and why."""
    chosen = "without logits" if reason is None else "with logits"
    KernelSelection("cross_entropy", chosen, reason or "").report(line_of(node))

"""Compilers that AOTAutograd calls for the graphs of a function: for inference, forward,
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from tpu_compile import reports
from tpu_compile.aliasing import Boxed, compile_apart
from tpu_compile.fx_utils import outputs
from tpu_compile.graphs import compile_graph
from tpu_compile.mutations import compile_writing
from tpu_compile.updates import mark_updates


def compile_inference(module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """Compile a graph without gradients."""
    reports.graph(module, "inference")
    _mark_updates(module)
    return _compile(module, example_inputs, len(outputs(module)))


def compile_forward(module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """Compile the forward graph; behind its outputs come the tensors kept for backward."""
    reports.graph(module, "forward")
    _mark_updates(module)
    return _compile(module, example_inputs, _metadata().num_forward_returns)


def compile_backward(module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """Compile the backward graph; autograd copies the gradients that it returns where need be."""
    reports.graph(module, "backward")
    return _compile(module, example_inputs, 0)


def _metadata() -> Any:
    metadata = torch._guards.TracingContext.get().fw_metadata
    assert metadata is not None
    return metadata


def _mark_updates(module: GraphModule) -> None:
    if torch._guards.TracingContext.try_get():  # none where Dynamo did not call the backend
        mark_updates(module, _metadata().mutated_inp_runtime_indices)


def _compile(module: GraphModule, example_inputs: Sequence[Any], visible: int) -> Boxed:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    # Constants in the graph have values, which are read.
    with unset_fake_temporarily():
        return compile_writing(
            module,
            lambda m: compile_apart(m, visible, lambda g: compile_graph(g, example_inputs)),
        )

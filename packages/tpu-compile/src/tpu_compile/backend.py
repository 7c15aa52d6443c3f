"""The backend ``tpu`` of ``torch.compile``: graphs on the device are ours, others Inductor's."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule

logger = logging.getLogger("tpu_compile")


def tpu(
    model: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's; what ``torch.compile`` calls.

    Args:
        model: The graph.
        example_inputs: Fake tensors and numbers.
        mode, options: Of ``torch.compile``, for Inductor; a graph on ``tpu`` has no use for them.

    Returns:
        A function of the graph's inputs.

    Raises:
        ConfigurationError: There is no such mode.
    """
    if not _is_ours(model, example_inputs):
        inductor = torch._TorchCompileInductorWrapper(mode or "default", options, None)
        compiled: Callable[..., Any] = inductor(model, example_inputs)
        return compiled
    _check_mode(mode)
    from torch._dynamo.backends.common import aot_autograd

    from tpu_compile.compilers import compile_backward, compile_forward, compile_inference
    from tpu_compile.graph_losses import has_refused_labels, leave_out_logits
    from tpu_compile.graphs import decompositions
    from tpu_compile.mutations import replaces_storages

    as_traced = GraphModule(model, copy.deepcopy(model.graph))
    if has_refused_labels(model):
        return as_traced  # the op raises, at its line
    leave_out_logits(model)
    with_autograd = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        decompositions=decompositions(),
        # Else AOTAutograd writes inputs behind the graph, which it cannot do for a new storage.
        keep_inference_input_mutations=replaces_storages(model),
    )
    # A check in a program needs no token for its order, nor do the inputs have to hold one.
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        compiled = with_autograd(model, example_inputs)
    return _with_tangents(compiled, as_traced)


def _with_tangents(compiled: Callable[..., Any], as_traced: GraphModule) -> Callable[..., Any]:
    """Run calls with dual numbers as traced: AOTAutograd has no forward derivatives."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        # The level is -1 outside of dual_level(): one comparison for all other calls.
        if forward_ad._current_level >= 0 and any(
            isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None
            for a in args
        ):
            logger.info("called with dual numbers, it runs op by op")
            return as_traced(*args)
        return compiled(*args)

    return call


def _reset() -> None:
    from tpu_compile.graph_op import forget_graphs

    forget_graphs()


vars(tpu)["reset"] = _reset  # called by torch.compiler.reset()


# Inductor's; it is not imported to ask it.
MODES = (
    "default",
    "lite",
    "reduce-overhead",
    "max-autotune-no-cudagraphs",
    "max-autotune",
)


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        from tpu_core.errors import ConfigurationError

        raise ConfigurationError(
            f"torch.compile has no mode {mode!r}.",
            values={"valid": ", ".join(MODES)},
            remedy="Use one of these; on device 'tpu' they all do the same.",
        )


def _is_ours(model: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Return whether a tensor of the graph is on the device: an input, or one that it makes."""
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type == "tpu":
            return True
    for node in model.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.device.type == "tpu":
            return True
        if torch.device("tpu").type in {
            d.type for d in node.kwargs.values() if isinstance(d, torch.device)
        }:
            return True
    return False

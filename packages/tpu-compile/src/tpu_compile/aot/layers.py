"""Trace a job with its equal layers as loops: one layer is traced for all of a run.

What cannot be scanned after all is compiled layer by layer, and a note says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_compile.aot.annotations import label
from tpu_compile.aot.capture import AotJob, Captured, capture
from tpu_compile.aot.optimizer_state import NotStackable
from tpu_compile.aot.parallelism import FullyShard
from tpu_compile.aot.repeats import find
from tpu_compile.aot.resharding import Resharding
from tpu_compile.aot.sharding import batch_spec
from tpu_compile.aot.state import ModelState, Run, holding
from tpu_compile.aot.trace import Scopes, fake_like, fake_mode, trace
from tpu_compile.layer_ops import LayerStack, define
from tpu_compile.layers import Annotations, partition
from tpu_core.errors import TpuError

# Fewer layers are compiled one by one with scan="auto": XLA makes a little more of them then.
_AUTO = 6


def capture_scanned(
    job: AotJob, scan: bool | str, remat: bool
) -> tuple[Captured, list[Run], list[str]]:
    """Trace a job, its equal layers as loops.

    Args:
        job: The job.
        scan: See `tpu_compile.aot`.
        remat: Whether scanned layers keep their inputs alone.

    Returns:
        The program, the layers that are scanned, and what to tell the user.
    """
    if scan is False:
        return capture(job), [], []
    least = _AUTO if scan == "auto" else 2
    runs, notes = find(job, least)
    runs = [replace(run, remat=remat or run.remat) for run in runs]
    if not runs:
        return capture(job), [], notes
    try:
        return capture(job, runs, scanning), runs, [*notes, *map(_describe, runs)]
    except (NotScanned, NotStackable) as error:
        reason = str(error)
    except TpuError:
        raise
    except Exception as error:  # such as an index past the one layer that is left
        reason = f"with one of them in their place the model raises {type(error).__name__}"
    labels = ", ".join(run.label for run in runs)
    return capture(job), [], [*notes, f"{labels} are compiled layer by layer: {reason}."]


def _describe(run: Run) -> str:
    kept = "their inputs alone are kept" if run.remat else "a loop compiles as fast as one of them"
    return f"The {len(run.names)} layers {run.label} are compiled as one loop: {kept}."


class NotScanned(Exception):
    """Layers that seemed equal cannot be scanned after all; the text says why."""


@contextmanager
def scanning(
    job: AotJob, state: ModelState, runs: Sequence[Run], own: Sequence[Any], sharded: FullyShard
) -> Iterator[None]:
    """The model with each run's layers in the place of its first, while it is traced.

    Args:
        job, state, runs: Parts of the traced program.
        own: The traced tensors, one a leaf.
        sharded: Gathers parameters.

    Raises:
        NotScanned: At the end of the block, if a run was not called exactly once.
    """
    define()
    calls = dict.fromkeys(range(len(runs)), 0)
    with ExitStack() as stack:
        for number, run in enumerate(runs):
            container = job.model.get_submodule(run.container)
            first = container._modules[run.names[0]]
            assert first is not None

            def forward(*args: Any, _n: int = number, _first: Any = first, **kwargs: Any) -> Any:
                calls[_n] += 1
                return _call(job, state, runs[_n], _first, own, sharded, args, kwargs)

            stack.enter_context(_replaced(container, run, first, forward))
        yield
    if any(count != 1 for count in calls.values()):
        raise NotScanned("the model does not call its layers by going through their container")


@contextmanager
def _replaced(
    container: torch.nn.Module, run: Run, first: torch.nn.Module, forward: Any
) -> Iterator[None]:
    before = dict(container._modules)
    checkpointing = getattr(first, "gradient_checkpointing", None)
    for name in run.names[1:]:
        del container._modules[name]
    first.forward = forward  # type: ignore[method-assign]  # for the block
    if checkpointing:
        first.gradient_checkpointing = False  # type: ignore[assignment]  # a plain flag
    try:
        yield
    finally:
        del first.forward
        if checkpointing:
            first.gradient_checkpointing = checkpointing
        container._modules.clear()
        container._modules.update(before)


def _call(
    job: AotJob,
    state: ModelState,
    run: Run,
    first: torch.nn.Module,
    own: Sequence[torch.Tensor],
    sharded: FullyShard,
    args: Any,
    kwargs: Any,
) -> torch.Tensor:
    """One run of layers, on traced tensors."""
    flat, tree = tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    stacks = state.stacks_of(run)
    x, *shared = [flat[i] for i in places]
    tensors = [x, *(own[i] for i in stacks.values()), *shared]
    wanted = [t.requires_grad and torch.is_grad_enabled() for t in tensors]
    wanted[0] = any(wanted)  # it is carried from layer to layer

    def of_layer(hidden: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        given = list(flat)
        for place, value in zip(places, (hidden, *values[len(stacks) :])):
            given[place] = value
        args, kwargs = tree_unflatten(given, tree)
        with holding(first, dict(zip(stacks, values))):
            sharded.enter(first)  # no hook is called for the layer itself
            result = None
            try:
                result = type(first).forward(first, *args, **kwargs)
            finally:
                sharded.leave(first, result)
        y: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return y

    mode = fake_mode()
    inputs = [
        fake_like(t, mode) for t in (x, *(state.tensors[i] for i in stacks.values()), *shared)
    ]
    # A layer's own graph has tensors of its own, and names.
    with _disable_current_modes(), torch.enable_grad(), fx_traceback.preserve_node_meta():
        again = Resharding.recomputing() if run.remat else nullcontext()
        joint = _trace_joint(of_layer, inputs, wanted, mode, Scopes(first, run.label), again)
        layer = partition(
            joint,
            len(stacks),
            differentiable=any(wanted),
            remat=run.remat,
            on_tpu=True,
            is_stacked=True,
            annotations=_annotations(job, state, run, x),
        )
    seed = torch.randint(0, 2**31 - 1, (2,), device=x.device) if layer.draws else None
    result: torch.Tensor = LayerStack.apply(layer, len(run.names), seed, *tensors)[0]
    return result


def _trace_joint(
    layer: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    mode: FakeTensorMode,
    scopes: Scopes,
    recomputing: AbstractContextManager[Any],
) -> GraphModule:
    """Graph of a layer's result, and of its inputs' gradients where any is wanted."""

    def forward(*values: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad(), scopes.watch():
            return [layer(*values)]

    def joint(*given: torch.Tensor) -> list[torch.Tensor | None]:
        *values, g = given
        leaves = [v.detach().requires_grad_(w) for v, w in zip(values, wanted)]
        with scopes.watch():
            y = layer(*leaves)
        scopes.name_backward([y])
        with torch.autocast("tpu", enabled=False):  # as backward outside of the block has it
            made = torch.autograd.grad(
                y, [v for v in leaves if v.requires_grad], g, allow_unused=True
            )
        each = iter(made)
        return [y.detach(), *(next(each) if w else None for w in wanted)]

    if not any(wanted):
        return trace(forward, inputs, mode)
    with recomputing:
        return trace(joint, [*inputs, fake_like(inputs[0], mode)], mode, keep_views=True)


def _annotations(job: AotJob, state: ModelState, run: Run, x: torch.Tensor) -> Annotations:
    carry = batch_spec(job.batch, job.mesh)[:1] if x.dim() > 1 else ()
    own = tuple(state.leaves[i].spec[1:] for i in state.stacks_of(run).values())
    return Annotations(carry, own, label)

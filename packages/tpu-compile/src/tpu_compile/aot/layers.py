"""Trace a job with its equal layers as loops: one layer is traced for all of a run.

What cannot be scanned after all is compiled layer by layer, and a note says why.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_compile.aot import scan as scans
from tpu_compile.aot.capture import AotJob, Captured, capture
from tpu_compile.aot.parallelism import FullyShard
from tpu_compile.aot.repeats import find
from tpu_compile.aot.resharding import Resharding
from tpu_compile.aot.sharding import Spec, batch_spec
from tpu_compile.aot.state import ModelState, NotStackable, Run
from tpu_compile.aot.trace import Scopes, fake_like, fake_mode, trace
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
    scans.define()
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
    x, *constants = [flat[i] for i in places]
    stacked = [own[i] for i in stacks.values()]
    tensors = [x, *constants, *stacked]
    wanted = [t.requires_grad and torch.is_grad_enabled() for t in tensors]
    wanted[0] = any(wanted)  # it is carried from layer to layer
    # A layer's own graph has tensors of its own, and names.
    with _disable_current_modes(), torch.enable_grad(), fx_traceback.preserve_node_meta():
        program = _trace_layer(job, state, run, first, sharded, flat, tree, places, tensors, wanted)
        scans.PROGRAMS[program.key] = program
    seed = None
    if scans.draws(program.forward):
        seed = torch.randint(0, 2**31 - 1, (2,), device=x.device)
    result: torch.Tensor = scans.Layers.apply(program, seed, x, *constants, *stacked)
    return result


def _trace_layer(
    job: AotJob,
    state: ModelState,
    run: Run,
    first: torch.nn.Module,
    sharded: FullyShard,
    flat: Sequence[Any],
    tree: Any,
    places: Sequence[int],
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[bool],
) -> scans.LayerProgram:
    stacks = state.stacks_of(run)
    constants = len(places) - 1
    mode = fake_mode()
    scopes = Scopes(first, run.label)
    inputs = [fake_like(t, mode) for t in tensors[: 1 + constants]]
    inputs += [fake_like(state.tensors[i], mode) for i in stacks.values()]
    grads = tuple(i for i, w in enumerate(wanted) if w)
    original = type(first).forward

    def layer(values: Sequence[torch.Tensor]) -> torch.Tensor:
        given = list(flat)
        for place, value in zip(places, values):
            given[place] = value
        args, kwargs = tree_unflatten(given, tree)
        with _holding(first, dict(zip(stacks, values[1 + constants :]))), scopes.watch():
            sharded.enter(first)  # no hook is called for the layer itself
            result = None
            try:
                result = original(first, *args, **kwargs)
            finally:
                sharded.leave(first, result)
        y: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return y

    def forward(*values: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [layer(values)]

    def joint(*inputs: torch.Tensor) -> list[torch.Tensor]:
        *values, g = inputs
        leaves = [v.detach().requires_grad_(w) for v, w in zip(values, wanted)]
        y = layer(leaves)
        scopes.name_backward([y])
        with torch.autocast("tpu", enabled=False):  # as backward outside of the block has it
            made = torch.autograd.grad(y, [leaves[i] for i in grads], g, allow_unused=True)
        filled = [torch.zeros_like(leaves[i]) if m is None else m for i, m in zip(grads, made)]
        return [y.detach(), *filled]

    def backward(*values: torch.Tensor) -> list[torch.Tensor]:
        with Resharding.recomputing():
            return joint(*values)[1:]

    carry, specs = _specs(job, state, run, tensors[0])
    make = functools.partial(
        scans.LayerProgram,
        scans.new_key(),
        len(run.names),
        constants=constants,
        is_recomputed=run.remat,
        carry_spec=carry,
        specs=specs,
    )
    if not any(wanted):
        graph = trace(forward, inputs, mode)
        return make(graph, None, (), ())
    with_gradient = [*inputs, fake_like(inputs[0], mode)]
    if run.remat:
        graph = trace(forward, inputs, mode)
        again = trace(backward, with_gradient, mode)
        kept = tuple(range(len(inputs)))
        return make(graph, again, kept, grads)
    both = trace(joint, with_gradient, mode, keep_views=True)
    parts = scans.partition(both, len(inputs))
    return make(*parts, grads)


def _specs(
    job: AotJob, state: ModelState, run: Run, x: torch.Tensor
) -> tuple[Spec, tuple[Spec, ...]]:
    spec = batch_spec(job.batch, job.mesh)[:1] if x.dim() > 1 else ()
    own = tuple(state.leaves[i].spec[1:] for i in state.stacks_of(run).values())
    return spec, own


@contextmanager
def _holding(layer: torch.nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """A layer with other tensors in its parameters and buffers, by name."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for prefix, module in layer.named_modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            kept.append((table, dict(table)))
            for name in table:
                full = f"{prefix}.{name}" if prefix else name
                if full in values:
                    table[name] = values[full]
    try:
        yield
    finally:
        for table, before in kept:
            table.update(before)

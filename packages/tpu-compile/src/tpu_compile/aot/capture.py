"""A model's forward pass or training step as one graph with named inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_compile.aot.losses import LeavingOutLogits
from tpu_compile.aot.optimizer_state import OptimizerState
from tpu_compile.aot.parallelism import FullyShard, placements_as_annotations
from tpu_compile.aot.sharding import Axes, Rules, batch_spec, check_spec, names_of
from tpu_compile.aot.state import Leaf, ModelState, Run
from tpu_compile.aot.trace import Scopes, fake_like, fake_mode, trace, values_unknown

Loss = str | Callable[..., Any] | None


@dataclass(frozen=True)
class AotJob:
    """The arguments of one ahead-of-time compile; see `tpu_compile.aot`."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: Mapping[str, int]
    shardings: Rules = None
    batch: Axes | Sequence[Axes] = "auto"
    loss: Loss = None
    optimizer: Any = None
    step: Callable[..., Any] | None = None

    @property
    def trains(self) -> bool:
        """True if gradients are taken."""
        return self.loss is not None or self.optimizer is not None or self.step is not None

    @property
    def title(self) -> str:
        """Description in words."""
        if self.step is not None or self.optimizer is not None:
            return "training step"
        return "forward and backward" if self.trains else "forward"


@dataclass(frozen=True)
class Captured:
    """A traced program.

    Attributes:
        graph: Of functional overloads that have lowerings.
        inputs: Kind of each placeholder.
        outputs: Name of each result.
        aliases: For inputs that an output replaces (parameters, state), the output.
        notes: Decisions and their reasons.
    """

    graph: GraphModule
    inputs: list[Leaf]
    outputs: list[str]
    aliases: dict[int, int]
    notes: tuple[str, ...] = ()


Scanning = Callable[..., AbstractContextManager[None]]


def capture(
    job: AotJob, runs: Sequence[Run] = (), scanning: Scanning = lambda *_: nullcontext()
) -> Captured:
    """Trace a job.

    Args:
        job: The model and what is done with it.
        runs: Layers to scan.
        scanning: Puts loops in their place while the model is traced.

    Raises:
        DataDependentError, UnsupportedOpError: See `tpu_compile.aot.trace.trace`.
        MeshError: A sharding does not fit.
    """
    divided = [a for axes in batch_spec(job.batch, job.mesh)[:1] for a in names_of(axes)]
    losses = LeavingOutLogits(math.prod(job.mesh.values()), divided)
    captured = _capture(job, runs, scanning, losses)
    if not losses.was_wrong:
        return replace(captured, notes=tuple(losses.notes))
    note = "The logits of a loss are built: something else reads them."
    return replace(_capture(job, runs, scanning, nullcontext()), notes=(note,))


def _capture(
    job: AotJob,
    runs: Sequence[Run],
    scanning: Scanning,
    losses: LeavingOutLogits | nullcontext[None],
) -> Captured:
    mode = fake_mode()
    state = ModelState(job.model, job.shardings, job.mesh, runs)
    scopes = Scopes(job.model)
    batch, call = _batch(job, mode)
    optimizer = OptimizerState(job.optimizer, state, mode) if job.optimizer is not None else None
    sharded = FullyShard(job.model, job.mesh, state.specs)
    tensors = state.fakes(mode)
    states = optimizer.fakes if optimizer else []
    names: list[str] = []

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        own = list(inputs[: len(tensors)])
        held = inputs[len(tensors) : len(tensors) + len(states)]
        given = inputs[len(tensors) + len(states) :]
        if job.trains:
            for i in state.trained():
                own[i] = own[i].detach().requires_grad_()
        args, kwargs = call(given)
        if isinstance(losses, LeavingOutLogits):
            losses.axes = {
                id(t): [a for axes in leaf.spec for a in names_of(axes)]
                for t, leaf in zip(own, state.leaves)
            }
        trained = {i: own[i] for i in state.trained()}
        resumed = optimizer.resumed(trained, held) if optimizer else None
        with (
            scopes.watch(),
            sharded.applied(),
            placements_as_annotations(job.model),
            state.swapped(own),
            scanning(job, state, runs, own, sharded),
            losses,
        ):
            if not job.trains:
                with torch.no_grad():
                    results = _named(job.model(*args, **kwargs), "output")
            elif job.step is not None:
                extra = (resumed,) if resumed is not None else ()
                results = _named(job.step(job.model, *extra, *args, **kwargs), "output")
            else:
                loss = _loss(job, args, kwargs)
                named = {state.leaves[i].name: p for i, p in trained.items()}
                results = _training_step(loss, named, resumed, scopes)
            after = _buffers_after(state, own)
            if isinstance(losses, LeavingOutLogits):
                losses.returns((results, after))
        if resumed is not None and optimizer is not None:
            for i, p in trained.items():
                after[state.leaves[i].name] = p.detach()
            held_after = optimizer.values(resumed, trained)
            after.update(zip((leaf.name for leaf in optimizer.leaves), held_after))
        # A batch's tensor that was written in place, such as a cache, keeps its memory.
        after.update((f"batch.{i}", t) for i, t in enumerate(given))
        names[:] = [*results, *after]
        return [*results.values(), *after.values()]

    inputs = [*tensors, *states, *batch]
    graph = trace(program, inputs, mode)
    leaves = [*state.leaves, *(optimizer.leaves if optimizer else [])]
    spec = batch_spec(job.batch, job.mesh)
    for place, tensor in enumerate(batch):
        name, shape = f"batch.{place}", tuple(tensor.shape)
        own = check_spec(name, shape, spec[: len(shape)], job.mesh)
        leaves.append(Leaf(name, "batch", shape, tensor.dtype, own))
    return _finish(graph, leaves, names)


def _training_step(
    loss: torch.Tensor,
    trained: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    scopes: Scopes,
) -> dict[str, torch.Tensor]:
    """Backward pass and optimizer step; without an optimizer the gradients are results."""
    results = {"loss": loss.detach()}
    scopes.name_backward([loss])
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    scopes.phase("optimizer")
    for (name, p), grad in zip(trained.items(), grads):
        if optimizer is not None:
            p.grad = grad
        elif grad is not None:
            results[f"gradient of {name}"] = grad
    if optimizer is not None:
        OptimizerState.step(optimizer)
    return results


def _batch(
    job: AotJob, mode: FakeTensorMode
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Fake tensors for those of the inputs, and what puts tensors in their places."""
    flat, tree = tree_flatten((job.args, dict(job.kwargs)))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def call(tensors: Sequence[torch.Tensor]) -> Any:
        values = list(flat)
        for place, tensor in zip(places, tensors):
            values[place] = tensor
        return tree_unflatten(values, tree)

    return [fake_like(flat[i], mode) for i in places], call


class _Idle:
    """Stands in for the optimizer where only the forward pass matters."""

    param_groups: Sequence[Any] = ()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def step(self) -> None:
        pass


def run_forward(
    job: AotJob, state: ModelState, mode: FakeTensorMode, watching: AbstractContextManager[Any]
) -> Any:
    """The result of a job's forward pass on fake tensors, without a graph, within ``watching``."""
    batch, call = _batch(job, mode)
    args, kwargs = call(batch)
    fakes = state.fakes(mode)
    sharded = FullyShard(job.model, job.mesh, state.specs)
    with (
        values_unknown(),
        mode,
        torch.no_grad(),
        sharded.applied(),
        placements_as_annotations(job.model),
        state.swapped(fakes),
        watching,
    ):
        if job.step is None:
            return _loss(job, args, kwargs) if job.trains else job.model(*args, **kwargs)
        try:
            optimizer = [_Idle()] if job.optimizer is not None else []
            return job.step(job.model, *optimizer, *args, **kwargs)
        except RuntimeError:
            return None  # there is nothing to take gradients of; the forward pass is over


def _loss(job: AotJob, args: Any, kwargs: Any) -> torch.Tensor:
    if isinstance(job.loss, str):
        loss = getattr(job.model, job.loss)(*args, **kwargs)
    elif job.loss is not None:
        loss = job.loss(job.model, *args, **kwargs)
    else:
        loss = job.model(*args, **kwargs)
        loss = getattr(loss, "loss", loss)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(
            f"The loss is {shown}, not a tensor without dimensions. Give loss=, a function of the "
            f"model and its inputs or the name of a method."
        )
    return loss


def _named(results: Any, prefix: str) -> dict[str, torch.Tensor]:
    tensors = [x for x in tree_flatten(results)[0] if isinstance(x, torch.Tensor)]
    return {f"{prefix}.{i}": t.detach() for i, t in enumerate(tensors)}


def _buffers_after(state: ModelState, own: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contents of the buffers after the step; a model may also put other tensors in their place."""
    after = {}
    for name, buffer in state.model.named_buffers():
        place = state.owners[name]
        if place not in state.stacks:
            after[state.leaves[place].name] = buffer.detach()
    return after


def _finish(graph: GraphModule, leaves: list[Leaf], names: list[str]) -> Captured:
    """Drop results that are inputs unchanged, and pair the others with the inputs they replace."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    (output,) = [n for n in graph.graph.nodes if n.op == "output"]
    made = [(n, r) for n, r in zip(names, output.args[0]) if r not in placeholders]
    output.args = ([r for _, r in made],)
    graph.graph.eliminate_dead_code()
    place = {leaf.name: i for i, leaf in enumerate(leaves)}
    aliases = {place[name]: j for j, (name, _) in enumerate(made) if name in place}
    return Captured(graph, leaves, [name for name, _ in made], aliases)

"""Finds equal layers that follow each other, and traces one for all.

The model runs once on fake tensors with every candidate watched: layers are scanned if each is
called once, each takes what the one before returned, nothing else of them is used, and all do the
same ops. What cannot be shown to be so is compiled layer by layer, and a note says why.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_compile.aot import scan as scans
from tpu_compile.aot.capture import Captured, Job, capture, run_forward
from tpu_compile.aot.sharding import Spec, batch_spec
from tpu_compile.aot.state import ModelState, NotStackable, Run
from tpu_compile.aot.trace import Scopes, fake_like, fake_mode, trace
from tpu_core.errors import TpuError

# Fewer layers are compiled one by one with scan="auto": XLA makes a little more of them then.
_AUTO = 6


def capture_scanned(
    job: Job, scan: bool | str, remat: bool
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


# --- finding them


@dataclass
class _Call:
    """What is known of one call of a layer."""

    name: str
    arguments: list[Any]
    digest: str = ""
    output: Any = None
    is_used: bool = False
    complaint: str = ""


@dataclass
class _Container:
    """Calls of a container's children, in order, and how many run now."""

    prefix: str
    module: torch.nn.Module
    calls: list[_Call] = field(default_factory=list)
    depth: int = 0


class _Outside(TorchDispatchMode):
    """Notes which layers' results are used by ops outside of their container."""

    def __init__(self, containers: Sequence[_Container]) -> None:
        super().__init__()
        self._containers = containers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        for container in self._containers:
            for call in container.calls if container.depth == 0 else ():
                if call.output is not None and any(call.output() is tensor for tensor in used):
                    call.is_used = True
        return func(*args, **(kwargs or {}))


def find(job: Job, least: int) -> tuple[list[Run], list[str]]:
    """Runs of at least ``least`` layers that can be scanned, and why others cannot."""
    containers = [c for c in _candidates(job.model) if _most_of_a_kind(c.module) >= least]
    if not containers:
        return [], []
    mode = fake_mode()
    with ExitStack() as stack:
        for container in containers:
            for name, layer in container.module._modules.items():
                if layer is not None and "forward" not in layer.__dict__:
                    stack.enter_context(_watched(container, name, layer))
        state = ModelState(job.model, job.shardings, job.mesh)
        result = run_forward(job, state, mode, _Outside(containers))
    for container in containers:
        for call in container.calls[:-1]:
            if call.output is not None and call.output() is not None:
                call.is_used = True  # it is in the model's result
    del result
    runs, notes = [], []
    for container in containers:
        found, complaint = _runs_of(container, least)
        runs += found
        if not found and complaint:
            notes.append(
                f"The layers of {container.prefix or 'the model'} are compiled one by one: "
                f"{complaint}."
            )
    outermost = [
        run
        for run in runs
        if not any(
            run is not other and run.prefixes[0].startswith(tuple(f"{p}." for p in other.prefixes))
            for other in runs
        )
    ]
    return outermost, notes


def _candidates(model: torch.nn.Module) -> Iterator[_Container]:
    for prefix, module in model.named_modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            yield _Container(prefix, module)


def _most_of_a_kind(container: torch.nn.Module) -> int:
    return max(Counter(type(layer) for layer in container._modules.values()).values(), default=0)


@contextmanager
def _watched(container: _Container, name: str, layer: torch.nn.Module) -> Iterator[None]:
    """Note calls of a layer in its container."""
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for earlier in container.calls[:-1]:
            if earlier.output is not None and earlier.output() is not None:
                earlier.is_used = True  # or may be: something holds it
        flat, _ = tree_flatten((args, kwargs))
        call = _Call(name, [weakref.ref(a) if isinstance(a, torch.Tensor) else a for a in flat])
        container.calls.append(call)
        recorder = _Recorder(layer, flat)
        held = {k for m in layer.modules() for k in ((id(m), n) for n in m.__dict__)}
        container.depth += 1
        try:
            with recorder:
                result = original(*args, **kwargs)
        finally:
            container.depth -= 1
        for m in layer.modules():
            for key, value in m.__dict__.items():
                if (id(m), key) not in held and isinstance(value, torch.Tensor):
                    call.complaint = f"a layer keeps a tensor as '{key}'"
        call.digest = recorder.digest()
        call.complaint = call.complaint or recorder.complaint
        tensors = result if isinstance(result, tuple) else (result,)
        first = tensors[0] if tensors else None
        if len(tensors) != 1 or not isinstance(first, torch.Tensor):
            call.complaint = "a layer returns more than one tensor"
        elif (
            not flat
            or not isinstance(flat[0], torch.Tensor)
            or _geometry(first) != _geometry(flat[0])
        ):
            call.complaint = "a layer's output is not shaped as its input"
        else:
            call.output = weakref.ref(first)
        return result

    layer.forward = forward  # type: ignore[method-assign]  # for the block
    try:
        yield
    finally:
        del layer.forward


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


class _Recorder(TorchDispatchMode):
    """Hashes the ops of a layer, its tensors numbered as they come."""

    def __init__(self, layer: torch.nn.Module, arguments: Sequence[Any]) -> None:
        super().__init__()
        self._digest = hashlib.sha256()
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        self._state = set()
        self.complaint = ""
        for i, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                self._name(value, f"argument {i}")
            elif i and isinstance(value, (bool, int, float, str, type(None))):
                self._digest.update(f"argument {i} {value!r}\n".encode())
        for tensors in (layer.named_parameters(), layer.named_buffers()):
            for name, tensor in tensors:
                self._name(tensor, name)
                self._state.add(id(tensor))

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)  # so that no other tensor takes its id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._digest.update(f"{func} {self._text(args)} {self._text(kwargs)}\n".encode())
        if func._schema.is_mutable:
            written = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
            if any(id(t) in self._state for t in written):
                self.complaint = "a layer writes to its buffers"
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._names:
                self._name(tensor, f"value {len(self._names)}")
        return result

    def _text(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._text, value)) + "]"
        if isinstance(value, dict):
            return self._text(sorted(value.items()))
        if isinstance(value, torch.Tensor):
            if id(value) not in self._names:
                self._name(value, f"outside {len(self._names)}")
                self.complaint = self.complaint or "a layer reads a tensor that it is not given"
            return f"{self._names[id(value)]} {value.dtype}{list(value.shape)}{value.stride()}"
        return repr(value)

    def digest(self) -> str:
        self._kept.clear()
        return self._digest.hexdigest()


def _runs_of(container: _Container, least: int) -> tuple[list[Run], str]:
    """Longest runs of scannable layers, and what broke the first one that was too short."""
    calls = container.calls
    names = [c.name for c in calls]
    if len(set(names)) < len(names):
        return [], "a layer is called more than once"
    order = [n for n in container.module._modules if n in names]
    if order != names:
        return [], "they are called in another order than they stand"
    runs: list[Run] = []
    complaint = ""
    begin = 0
    for i in range(1, len(calls) + 1):
        reason = _break(calls[i - 1], calls[i]) if i < len(calls) else "end"
        if reason:
            if i - begin >= least:
                own = [c.complaint for c in calls[begin:i] if c.complaint]
                if own:
                    complaint = complaint or own[0]
                else:
                    runs.append(_run(container, calls[begin:i]))
            elif reason != "end":
                complaint = complaint or reason
            begin = i
    return runs, complaint


def _break(before: _Call, after: _Call) -> str:
    if before.complaint:
        return before.complaint
    if before.is_used:
        return "what a layer returns is used elsewhere"
    if before.digest != after.digest:
        return "they differ"
    if before.output is None or after.arguments[0] is None:
        return "a layer is not called with a tensor"
    if not _same(after.arguments[0], before.output):
        return "something comes between them"
    if len(before.arguments) != len(after.arguments):
        return "they are called differently"
    pairs = zip(before.arguments[1:], after.arguments[1:])
    if not all(_same(a, b) for a, b in pairs):
        return "they are called with different arguments"
    return ""


def _same(a: Any, b: Any) -> bool:
    # References to one tensor are equal, alive or not, only if they are the same object.
    return a is b or (not isinstance(a, weakref.ref) and not isinstance(b, weakref.ref) and a == b)


def _run(container: _Container, calls: Sequence[_Call]) -> Run:
    layers = [container.module._modules[c.name] for c in calls]
    wants = [bool(getattr(m, "gradient_checkpointing", False)) and m.training for m in layers if m]
    return Run(container.prefix, tuple(c.name for c in calls), all(wants), all(wants))


# --- tracing them


@contextmanager
def scanning(
    job: Job, state: ModelState, runs: Sequence[Run], own: Sequence[Any]
) -> Iterator[None]:
    """The model with each run's layers in the place of its first, while it is traced.

    Args:
        job, state, runs: What is traced.
        own: The traced tensors, one a leaf.

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
                return _call(job, state, runs[_n], _first, own, args, kwargs)

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
    job: Job,
    state: ModelState,
    run: Run,
    first: torch.nn.Module,
    own: Sequence[torch.Tensor],
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
        program = _trace_layer(job, state, run, first, flat, tree, places, tensors, wanted)
        scans.PROGRAMS[program.key] = program
    seed = None
    if scans.draws(program.forward):
        seed = torch.randint(0, 2**31 - 1, (2,), device=x.device)
    result: torch.Tensor = scans.Layers.apply(program, seed, x, *constants, *stacked)
    return result


def _trace_layer(
    job: Job,
    state: ModelState,
    run: Run,
    first: torch.nn.Module,
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
            result = original(first, *args, **kwargs)
        y: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return y

    def forward(*values: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [layer(values)]

    def joint(*values: torch.Tensor) -> list[torch.Tensor]:
        *values, g = values  # type: ignore[assignment]  # a list from here on
        leaves = [v.detach().requires_grad_(w) for v, w in zip(values, wanted)]
        y = layer(leaves)
        scopes.name_backward([y])
        with torch.autocast("tpu", enabled=False):  # as backward outside of the block has it
            made = torch.autograd.grad(y, [leaves[i] for i in grads], g, allow_unused=True)
        filled = [torch.zeros_like(leaves[i]) if m is None else m for i, m in zip(grads, made)]
        return [y.detach(), *filled]

    def backward(*values: torch.Tensor) -> list[torch.Tensor]:
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


def _specs(job: Job, state: ModelState, run: Run, x: torch.Tensor) -> tuple[Spec, tuple[Spec, ...]]:
    spec = batch_spec(job.batch, job.mesh)[:1] if x.dim() > 1 else ()
    own = tuple(state.leaves[i].spec[1:] for i in state.stacks_of(run).values())
    return spec, own


@contextmanager
def _holding(layer: torch.nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """A layer with other tensors in its parameters and buffers, by name."""
    kept = []
    for prefix, module in layer.named_modules():
        for table in (module._parameters, module._buffers):
            kept.append((table, dict(table)))
            for name in table:
                full = f"{prefix}.{name}" if prefix else name
                if full in values:
                    table[name] = values[full]  # type: ignore[assignment]  # a plain tensor serves
    try:
        yield
    finally:
        for table, before in kept:
            table.update(before)

"""Find equal layers that follow each other.

The model runs once on fake tensors with every candidate watched: layers can be scanned if each is
called once, each takes what the one before returned, nothing else uses that, and all do the same
ops. What cannot be shown to be so is left, and a note says why.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tpu_compile.aot.capture import AotJob, run_forward
from tpu_compile.aot.state import ModelState, Run
from tpu_compile.aot.trace import fake_mode


@dataclass
class _Call:
    """Record of one call of a layer."""

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


def find(job: AotJob, least: int) -> tuple[list[Run], list[str]]:
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

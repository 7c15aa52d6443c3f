"""Holders of device memory: parameters, gradients, optimizer state, other tensors, with names.

A search through Python's objects: for summaries and errors, not for loops.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpu_core import _C, memory_stacks

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
TENSORS = "other tensors"
# Results of ops with a gradient, and what no Python object has: saved for backward.
ACTIVATIONS = "activations"
PENDING = "still to be computed"  # results of recorded ops
RUNNING = "results of the ops that run"
_KINDS = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, TENSORS, ACTIVATIONS, PENDING)


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A storage on the device.

    Attributes:
        kind: One of the kinds above.
        is_pending: It is the result of recorded ops, and takes memory once they have run.
        name: Such as ``"GPT.head.weight"``; "" where there is none.
        nbytes: Bytes that it holds.
        dtype, shape: Of its value.
        line: The user's line that made it, if memory history was recorded then.
    """

    kind: str
    name: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    line: str | None
    is_pending: bool = False

    @property
    def geometry(self) -> str:
        """Such as ``"float32[8, 128]"``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return f"{self.geometry} {self.name or self.kind}" + (
            f" at {self.line}" if self.line else ""
        )


def live_tensors(device: int) -> list[LiveTensor]:
    """Storages that hold memory of a device, or will once recorded ops have run, the largest first.

    Storages that share a value, as a tensor and its `clone()` do until one is written, count once.

    Args:
        device: Its index.
    """
    names = _names(gc.get_objects())
    found: dict[int, LiveTensor] = {}
    for address, value, nbytes, allocated, dtype, shape, stack in _C.live_storages(device):
        kind, name = names.get(address, (ACTIVATIONS, ""))
        known = found.get(value)
        if known is not None and _KINDS.index(known.kind) <= _KINDS.index(kind):
            continue
        line = memory_stacks.stack(stack).line
        found[value] = LiveTensor(
            kind, name, nbytes, _dtype_name(dtype), shape, line, is_pending=not allocated
        )
    return sorted(found.values(), key=lambda tensor: -tensor.nbytes)


def bytes_by_kind(tensors: Iterable[LiveTensor]) -> dict[str, int]:
    """Bytes of each kind that there is, in the order of the kinds."""
    sums = dict.fromkeys(_KINDS, 0)
    for tensor in tensors:
        sums[PENDING if tensor.is_pending else tensor.kind] += tensor.nbytes
    return {kind: nbytes for kind, nbytes in sums.items() if nbytes}


def _dtype_name(code: int) -> str:
    from tpu_core.dtypes import dtype_of_code

    return str(dtype_of_code(code)).removeprefix("torch.")


def _names(objects: list[Any]) -> dict[int, tuple[str, str]]:
    """Kind and name of storages, by their address."""
    names: dict[int, tuple[str, str]] = {}
    for tensor, kind, name in _named_tensors(objects):
        for address in _addresses(tensor):
            names.setdefault(address, (kind, name))
    return names


def _named_tensors(objects: list[Any]) -> Iterator[tuple[Any, str, str]]:
    """Tensors with their kinds and names; of several of a storage the first one counts."""
    # The class itself: `isinstance` would ask proxies, which may load what they stand for.
    modules = [o for o in objects if issubclass(type(o), torch.nn.Module)]
    optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]
    tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
    parameters: dict[int, str] = {}
    for prefix, module in _roots(modules):
        for name, parameter in module.named_parameters():
            parameters.setdefault(id(parameter), f"{prefix}.{name}")
            yield parameter, PARAMETERS, f"{prefix}.{name}"
        for name, buffer in module.named_buffers():
            yield buffer, BUFFERS, f"{prefix}.{name}"
    yield from ((t, PARAMETERS, "") for t in tensors if type(t) is torch.nn.Parameter)
    on_device = [t for t in tensors if _is_on_device(t)]
    for tensor in on_device:
        if tensor.is_leaf and tensor.grad is not None:
            owner = parameters.get(id(tensor), "")
            yield tensor.grad, GRADIENTS, f"gradient of {owner}" if owner else ""
    for optimizer in optimizers:
        yield from _states(optimizer, parameters)
    yield from ((t, TENSORS, "") for t in on_device if t.is_leaf or not t.requires_grad)


def _states(
    optimizer: torch.optim.Optimizer, parameters: dict[int, str]
) -> Iterator[tuple[Any, str, str]]:
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict):
            owner = parameters.get(id(parameter), "a parameter")
            yield from ((value, OPTIMIZER, f"{key} of {owner}") for key, value in state.items())


def _roots(modules: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that are no other's, by the name of their class, numbered where several have it."""
    children = {id(child) for module in modules for child in module._modules.values()}
    counts: dict[str, int] = {}
    for module in modules:
        if id(module) in children:
            continue
        while isinstance(inner := module._modules.get("_orig_mod"), torch.nn.Module):
            module = inner  # of torch.compile
        name = type(module).__name__
        counts[name] = counts.get(name, 0) + 1
        yield (name if counts[name] == 1 else f"{name} ({counts[name]})"), module


def _is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "tpu"


def _addresses(tensor: Any) -> Iterator[int]:
    if not _is_on_device(tensor):
        return
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass that wraps others, as DTensor does, has no storage of its own.
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            for attribute in flatten()[0]:
                yield from _addresses(getattr(tensor, attribute))
            return
    try:
        yield tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a fake tensor, or a subclass without memory
        return

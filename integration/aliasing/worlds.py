"""One program in two worlds: tensors on the CPU and their counterparts on the device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOST_TENSORS = 10


class Skip(Exception):
    """The step has no defined or no exact result here, so it proves nothing."""


class Picks:
    """Choices of one step, from numbers that hypothesis drew."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._next = 0

    def below(self, n: int) -> int:
        """A number from 0 up to ``n - 1``."""
        number = self._numbers[self._next % len(self._numbers)]
        self._next += 1
        return number % n

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def dim(self, t: torch.Tensor) -> int:
        """A dim of ``t``, rarely one that it does not have."""
        return self.below(t.dim()) - self.of((0, 0, t.dim())) if t.dim() else 0

    def maybe_wrong(self, right: T, wrong: T) -> T:
        """``right``, but one time in twenty ``wrong``."""
        return wrong if self.below(20) == 19 else right


@dataclass
class World:
    """The tensors of a program on one device.

    Attributes:
        device: Where they are.
        tensors: The pool that steps take from and add to.
        decides: Whether `require` looks; the CPU's world decides for both.
    """

    device: str
    decides: bool
    tensors: list[torch.Tensor] = field(default_factory=list)

    def pick(self, p: Picks) -> torch.Tensor:
        return p.of(self.tensors)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Values as a tensor of this world."""
        return values.clone().to(self.device)

    def require(self, condition: Callable[[], bool]) -> None:
        """Leave the step out unless ``condition`` holds in the CPU's world.

        Raises:
            Skip: It does not hold.
        """
        if self.decides and not condition():
            raise Skip

    def add(self, new: Sequence[torch.Tensor], position: int) -> None:
        for t in new:
            if len(self.tensors) < MOST_TENSORS:
                self.tensors.append(t)
            else:
                self.tensors[position % MOST_TENSORS] = t
                position += 1


# What a step does: returns new tensors for the pool.
StepFunction = Callable[[World, Picks], Sequence[torch.Tensor]]


def run_step(step: StepFunction, world: World, numbers: Sequence[int]) -> BaseException | None:
    """Run a step; returns what it raised."""
    picks = Picks(numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            new = step(world, picks)
        except Skip:
            raise
        except Exception as error:
            return error
    world.add(new, picks.below(MOST_TENSORS))
    return None


def message(error: BaseException | None) -> tuple[type, str] | None:
    """Type and text of an error, names of devices left out."""
    if error is None:
        return None
    text = str(error).split("\nException raised from")[0]
    text = re.sub(r"\btorch\.(\w+)Tensor\b|\b(?:CPU|tpu)(\w+)Type\b", r"<\1\2>", text)
    return type(error), re.sub(r"\b(cpu|CPU|tpu(:\d)?|TPU)\b", "<device>", text)


def geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return (
        t.dtype,
        tuple(t.shape),
        # Meta functions and kernels differ in the strides that they give a new empty tensor.
        t.stride() if t.numel() else None,
        t.storage_offset(),
        t.is_contiguous(),
        t.untyped_storage().nbytes(),
        t.data_ptr() - t.untyped_storage().data_ptr() if t.numel() else 0,
    )


def alias_groups(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the first one on the same storage."""
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [storages.index(s) for s in storages]


def assert_same_geometry(cpu: World, device: World) -> None:
    for d, c in zip(device.tensors, cpu.tensors, strict=True):
        assert geometry(d) == geometry(c), f"on the device {geometry(d)}, on the CPU {geometry(c)}"
    assert alias_groups(device.tensors) == alias_groups(cpu.tensors)
    # Storages that hold bytes lie at addresses of their own.
    pointers = {
        t.untyped_storage()._cdata: t.untyped_storage().data_ptr()
        for t in device.tensors
        if t.untyped_storage().nbytes()
    }
    assert len(set(pointers.values())) == len(pointers)


def assert_same_values(cpu: torch.Tensor, device: torch.Tensor) -> None:
    host = device.cpu()
    assert host.dtype == cpu.dtype
    assert bits(host) == bits(cpu), f"on the device {host}, on the CPU {cpu}"


def bits(t: torch.Tensor) -> list[int]:
    packed = t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return packed.view(-1).view(torch.uint8).tolist()


def assert_same_storages(cpu: World, device: World) -> None:
    """Every byte of every storage, those that no tensor of the pool shows included."""
    for c, d in zip(cpu.tensors, device.tensors):
        whole_c, whole_d = (
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            for t in (c, d)
        )
        assert whole_d.cpu().tolist() == whole_c.tolist(), f"whole storage, {c.dtype} {c.shape}"

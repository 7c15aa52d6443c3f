"""Random state: 16 bytes a device, seed then offset, which DTensor slices and advances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tpu_core import _C
from tpu_core.device.devices import _index, device_count


class _Generators:
    """The default generator of each device, made when first asked for."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} devices, not {index + 1}")
        return _C.default_generator(index % len(self))

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[i] for i in range(len(self)))


default_generators = _Generators()


def _get_generator(device: Any = "tpu") -> torch.Generator:
    return _C.default_generator(_index(device))


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """Random state of a device: a ``uint8`` CPU tensor of 16 bytes, seed then offset."""
    return _get_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    """Set the random state of a device from what `get_rng_state` gave."""
    _get_generator(device).set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    """Random states of all devices."""
    return [g.get_state() for g in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the random states of all devices."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator; starts nothing."""
    _get_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator; starts nothing. `torch.manual_seed` calls it."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's generator from the system's randomness."""
    _get_generator().seed()


def seed_all() -> None:
    """Seed every device's generator with one seed from the system's randomness."""
    first = None
    for generator in default_generators:
        if first is None:
            first = generator.seed()
        else:
            generator.manual_seed(first)


def initial_seed() -> int:
    """Seed of the current device's generator."""
    return int(_get_generator().initial_seed())

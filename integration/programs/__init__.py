"""Programs of the kind that people write: plain PyTorch that knows no device, a file each.

Every file has ``run(device)``, which makes weights and data on the CPU from a seed, moves them, and
yields after each step the number it would print: as a float where such a program reads it in each
step, else as a tensor. Draws are made on the CPU, so that all devices compute the same numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAMES = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))


def start(name: str, device: str) -> Iterator[float | torch.Tensor]:
    """Begin a program; each `next` of what is returned is a step."""
    begun: Iterator[float | torch.Tensor] = importlib.import_module(f"programs.{name}").run(device)
    return begun

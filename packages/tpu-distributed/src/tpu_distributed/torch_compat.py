"""Differences between the supported releases of torch. Each branch names the release it is for, and
goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def functional_collective(name: str) -> Callable[..., Any]:
    """Of ``torch.distributed``: "all_gather" or "reduce_scatter" of one tensor."""
    from torch.distributed import _functional_collectives as collectives

    # torch 2.11 has the second name alone.
    found = getattr(collectives, f"{name}_single", None) or getattr(collectives, f"{name}_tensor")
    collective: Callable[..., Any] = found
    return collective

from typing import Any

import torch

def make_backend(rank: int, size: int, name: str, timeout: float, implementation: Any) -> Any: ...
def ring_all_reduce(
    source: int,
    out: int,
    elements: int,
    dtype: torch.dtype,
    op: str,
    factor: float,
    divisor: int,
    rank: int,
    size: int,
    next: int,
    previous: int,
    seconds: float,
) -> None: ...

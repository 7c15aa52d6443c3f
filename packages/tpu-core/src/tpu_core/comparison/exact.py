"""Code that names its dtypes, run in float64 all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WIDER = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}


class _Float64(TorchDispatchMode):
    """Ops that are asked for a narrower floating-point dtype give float64 (complex128)."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = _pytree.tree_map_only(
            torch.dtype, lambda dtype: _WIDER.get(dtype, dtype), (args, kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def float64() -> Iterator[None]:
    """Have what a block computes on the CPU computed in float64, whatever dtypes it names."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", enabled=False), _Float64():
            yield
    finally:
        torch.set_default_dtype(default)

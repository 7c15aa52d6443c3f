"""Support for ``torch.distributed.split_group`` that PyTorch's base class lacks."""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch._C._distributed_c10d import Backend


def install() -> None:
    """Give backends of this package options, and let these be copied."""
    copyreg.pickle(Backend.Options, _reduce)  # of exactly this class
    if not hasattr(Backend, "options"):
        # PyTorch's stub says that it has them; only its subclasses do.
        backend: Any = Backend
        backend.options = property(_options)


def _options(backend: Any) -> Any:
    """Options for a part of a group; `split_group` adds timeout and name."""
    _tell_gloo_its_ranks()
    return Backend.Options(backend.name())


def _tell_gloo_its_ranks() -> None:
    """List the ranks of the default group in the options of its gloo, for CPU tensors.

    gloo counts them itself only in the first gloo group of a process, and in a later one reads
    beyond the end of an empty list when it is split (torch 2.13).
    """
    from torch.distributed import distributed_c10d as c10d

    group = c10d._get_default_group()
    try:
        gloo = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # made for device tensors alone
        return
    if isinstance(gloo, c10d.ProcessGroupGloo) and not gloo.options.global_ranks_in_group:
        gloo.options.global_ranks_in_group = list(range(group.size()))


def _reduce(options: Any) -> tuple[Any, ...]:
    values = (options.backend, options._timeout, options.group_name)
    return _made, (*values, list(options.global_ranks_in_group))


def _made(backend: str, timeout: Any, group_name: Any, ranks: list[int]) -> Any:
    options = Backend.Options(backend, timeout)
    options.group_name, options.global_ranks_in_group = group_name, ranks
    return options

"""Differences between the supported releases of torch. Each branch names the release it is for, and
goes with it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

# Dynamo hands modules to functions that AOTAutograd traces, from torch 2.13 on at the latest.
TRACES_WITH_MODULES = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)
# torch 2.11 has the name of the default backend of `torch.compile` as the default of an argument.
HAS_DEFAULT_BACKEND = hasattr(torch.compiler, "set_default_backend")


def set_default_backend(name: str) -> None:
    """Have ``torch.compile`` take a backend where none is named, if not `HAS_DEFAULT_BACKEND`."""
    defaults: Any = torch.compile.__kwdefaults__
    defaults["backend"] = name


def inline_when_called(rules: Any, files: Collection[str]) -> None:
    """Have Dynamo trace into functions of some files, whose package it skips.

    Args:
        rules: ``torch._dynamo.trace_rules``, which skips the package already.
        files: Of one package.
    """
    if hasattr(rules, "BUILTIN_INLINE_WHEN_CALLED"):
        rules.BUILTIN_INLINE_WHEN_CALLED.update(files)
        return
    # torch 2.11: a package is skipped whole, so that all its other files take its place.
    package = next(d for d in rules.SKIP_DIRS if all(f.startswith(d) for f in files))
    rules.SKIP_DIRS.remove(package)
    rules.SKIP_DIRS += [p for p in map(str, Path(package).rglob("*.py")) if p not in files]
    rules._recompile_re()


def first_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Optimizer state of a parameter before the first step."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    if not torch.optim.Adagrad([torch.zeros(1, device="cpu")]).state:
        return {}
    # torch 2.11: Adagrad makes its state when it is made.
    start = optimizer.defaults["initial_accumulator_value"]
    return {"step": torch.tensor(0.0, device="cpu"), "sum": torch.full_like(parameter, start)}


def parameter_groups(state: Any) -> list[Any]:
    """The groups of parameters of a module that ``fully_shard`` was called with."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    # torch 2.11: one at most.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]

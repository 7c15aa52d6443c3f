"""Differences between the supported releases of torch. Each branch names the release it is for,
and goes with it; that of the extension is ``csrc/torch_compat.h``.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

# Dtypes that XLA does not have; the second comes with torch 2.15, for bfloat16 and complex numbers.
HALF_COMPLEX = (torch.complex32, getattr(torch, "bcomplex32", torch.complex32))

_MINOR = tuple(int(n) for n in torch.__version__.split(".")[:2])

# Dynamo hands modules to functions that AOTAutograd traces, from torch 2.13 on at the latest.
TRACES_WITH_MODULES = _MINOR >= (2, 13)
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
    if not torch.optim.Adagrad([torch.zeros(1)]).state:
        return {}
    # torch 2.11: Adagrad makes its state when it is made.
    start = optimizer.defaults["initial_accumulator_value"]
    return {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, start)}


def complete_meta_functions() -> None:
    """Register the meta functions that torch 2.11 lacks."""
    name = "_scaled_dot_product_fused_attention_overrideable_backward"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        return

    def gradients(grad: Any, q: Any, k: Any, v: Any, bias: Any, *_: Any, **__: Any) -> Any:
        like = torch.empty_like
        return like(q), like(k), like(v), None if bias is None else like(bias)

    _LIBRARIES.append(library := torch.library.Library("aten", "IMPL", "Meta"))
    library.impl(name, gradients)


# Registrations end with their library objects.
_LIBRARIES: list[torch.library.Library] = []

"""Differences between the supported releases of torch. Each branch names the release it is for,
and goes with it; that of the extension is ``csrc/torch_compat.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

# Dtypes that XLA does not have; the second comes with torch 2.15, for bfloat16 and complex numbers.
HALF_COMPLEX = (torch.complex32, getattr(torch, "bcomplex32", torch.complex32))

_MINOR = tuple(int(n) for n in torch.__version__.split(".")[:2])

# Dynamo hands modules to functions that AOTAutograd traces, from torch 2.13 on at the latest.
TRACES_WITH_MODULES = _MINOR >= (2, 13)
# Numbers beyond the range of float8_e4m3fn are 448 or -448 from torch 2.13 on at the latest, and
# NaN in torch 2.11.
FLOAT8_SATURATES = _MINOR >= (2, 13)
# torch 2.11 has the name of the default backend of `torch.compile` as the default of an argument.
HAS_DEFAULT_BACKEND = hasattr(torch.compiler, "set_default_backend")


def name_profiler_activity(name: str) -> None:
    """Give the profiler's activity of the device its name, as renaming does from torch 2.13 on."""
    from torch._C._profiler import ProfilerActivity

    if not hasattr(ProfilerActivity, name):  # torch 2.11
        setattr(ProfilerActivity, name, ProfilerActivity.PrivateUse1)


def mark_started() -> None:
    """Have ``torch.accelerator.synchronize`` act, now that the device has started."""
    if _MINOR >= (2, 13):
        return
    # torch 2.11: it does nothing until the device's module has been asked to start itself.
    module: Any = torch.get_device_module("tpu")
    if not hasattr(module, "_lazy_init"):
        module._lazy_init = lambda: None
    torch.accelerator.current_device_index()


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


def parameter_groups(state: Any) -> list[Any]:
    """The groups of parameters of a module that ``fully_shard`` was called with."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    # torch 2.11: one at most.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def functional_collective(name: str) -> Callable[..., Any]:
    """Of ``torch.distributed``: "all_gather" or "reduce_scatter" of one tensor."""
    from torch.distributed import _functional_collectives as collectives

    # torch 2.11 has the second name alone.
    found = getattr(collectives, f"{name}_single", None) or getattr(collectives, f"{name}_tensor")
    collective: Callable[..., Any] = found
    return collective


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


def stricter_meta_functions() -> dict[str, Callable[..., Any]]:
    """Meta functions, by overload, that check what those of torch 2.11 let through."""
    if _MINOR >= (2, 13):
        return {}

    def embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
        right = indices.dtype in (torch.int64, torch.int32)
        torch._check(right, lambda: f"Indices of an embedding are not {indices.dtype}")
        return torch.ops.aten.embedding.default(weight, indices)

    def weight_int8pack_mm(
        x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        fits = weight.size(1) == x.size(1) and scales.shape == weight.shape[:1]
        torch._check(fits, lambda: f"{x.shape} by {weight.shape} with {scales.shape}")
        return torch.ops.aten._weight_int8pack_mm.default(x, weight, scales)

    return {
        "aten.embedding.default": embedding,
        "aten._weight_int8pack_mm.default": weight_int8pack_mm,
    }


# Registrations end with their library objects.
_LIBRARIES: list[torch.library.Library] = []

"""The module ``torch.tpu``: PyTorch's device module interface.

Everything here works before the device is started unless it needs a running device; nothing here
imports jax by itself.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from tpu_core.device.amp import get_amp_supported_dtype
from tpu_core.device.devices import (  # noqa: F401 (PyTorch looks the private names up)
    _DeviceGuard,
    _exchange_device,
    _is_in_bad_fork,
    _maybe_exchange_device,
    current_device,
    device,
    device_count,
    device_of,
    get_device,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_bf16_supported,
    is_initialized,
    set_device,
    synchronize,
)
from tpu_core.device.memory import (
    empty_cache,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from tpu_core.device.reporting import (
    compare,
    compile_report,
    metrics,
    no_recompile,
    reset_metrics,
)
from tpu_core.device.rng import (  # noqa: F401
    _get_generator,
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from tpu_core.device.settings import (
    get_sync_debug_mode,
    precision,
    set_eager_mode,
    set_sync_debug_mode,
)
from tpu_core.device.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    is_current_stream_capturing,
    set_stream,
    stream,
)

# Under the name that CUDA's module has, too.
OutOfMemoryError = torch.OutOfMemoryError

__all__ = [
    "Event",
    "OutOfMemoryError",
    "Stream",
    "compare",
    "compile_report",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "get_sync_debug_mode",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "metrics",
    "no_recompile",
    "precision",
    "reset_accumulated_memory_stats",
    "reset_metrics",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_eager_mode",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_sync_debug_mode",
    "stream",
    "synchronize",
]

# Imported at their first use.
_MODULES = ("nvtx", "profiler")


def _install() -> None:
    from tpu_core.device.install import install

    install()


@functools.cache
def _contributed() -> dict[str, EntryPoint]:
    """Modules that other packages add under ``torch.tpu``, loaded when they are first used."""
    return {e.name: e for e in entry_points(group="tpu_core.device_modules")}


def __dir__() -> list[str]:
    return sorted({*__all__, *_contributed(), *_MODULES, "eager_mode"})


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch.utils.checkpoint saves random state only if this is true
        return is_initialized()
    if name == "eager_mode":
        from tpu_core import modes

        return modes.active().name
    if name in _MODULES:
        return importlib.import_module(f"tpu_core.device.{name}")
    if name.startswith("__"):
        raise AttributeError(name)
    if not name.startswith("_") and (contributed := _contributed().get(name)) is not None:
        return contributed.load()
    raise AttributeError(
        f"module 'torch.tpu' has no attribute '{name}'. What it has is listed in "
        "docs/reference/device-contract.md."
    )

"""Start of the device on first use, and the functions that the extension calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpu_core import (
    _C,
    gc_control,
    internal_files,
    modes,
    platforms,
    synchronization,
    tiers,
    torch_compat,
    versions,
)
from tpu_core.config import config, on_reload, started
from tpu_core.errors import ForkedProcessError, ProcessGroupError
from tpu_core.host_copies import HOST_COPIES

_lock = threading.RLock()
_state: Runtime | None = None
_owner = 0


@dataclass(slots=True)
class Runtime:
    """The running device.

    Attributes:
        client: The PJRT client.
        builder: Makes programs for segments.
        store: The cache beyond this process, or None.
    """

    client: Any
    builder: Any
    store: Any


def device_count() -> int:
    """Number of devices, without starting anything."""
    return platforms.device_count()


def is_initialized() -> bool:
    """Return whether the device was used in this process."""
    return _state is not None and _owner == os.getpid()


def initialize() -> Runtime:
    """Start the runtime; called by the extension on the device's first use.

    Raises:
        ForkedProcessError: This process was forked from one that had used the device.
        TpuNotAvailableError: The platform cannot be started.
        VersionMismatchError: The installed jax or jaxlib is too old or too new.
    """
    global _state, _owner
    if _state is not None:
        if _owner != os.getpid():
            raise ForkedProcessError(
                "This process was forked from one that had already used device 'tpu'."
            )
        return _state
    with _lock:
        if _state is not None:
            return _state
        # Importing jax makes a million objects; looking for garbage among them takes a quarter of
        # the start.
        with gc_control.importing():
            _state = _start()
        _owner = os.getpid()
    torch_compat.mark_started()
    if profiler := sys.modules.get("tpu_core.profiler.collection"):
        profiler.device_started()
    return _state


def _start() -> Runtime:
    # Raises where there is no device, before anything slow is imported.
    platforms.Platform.resolve()
    versions.require_jax()  # jax's own message, if there is one, names no way out

    from tpu_core import (
        checkpointing,
        exit_calls,
        exit_checks,
        input_pipeline,
        layouts,
        logs,
        lowering,
        memory_limit,
        multiprocessing_reductions,
        recurrent,
    )
    from tpu_core.cache.tiers import open_store, remembered_names
    from tpu_core.compiler.builder import ProgramBuilder
    from tpu_core.lowering.registry import REGISTRY
    from tpu_core.metrics import METRICS
    from tpu_core.pjrt import client as pjrt
    from tpu_core.pjrt import garbage
    from tpu_core.recorder import checked, functional_variants
    from tpu_core.verification import watch

    logs.configure()
    client = pjrt.start()
    garbage.keep_signals_out()
    gc_control.freeze_in_children()
    _keep_workers_quiet()
    lowering.load()
    store = open_store(config())
    builder = ProgramBuilder(client, store, watch)
    runtime = Runtime(client, builder, store)
    _set_callbacks(client, builder)
    # Working them out takes a fifth of the start.
    overloads = remembered_names(
        store,
        functional_variants.recorded_overloads,
        versions=builder.versions(),
        lowerings=" ".join(entry.op for entry in REGISTRY),
    )
    _C.register_overloads(overloads)
    internal_files.apply()
    _C.set_default_mode(modes.current().native())
    tiers.choose(client)
    checked.choose()
    on_reload(_apply_config)
    started()
    memory_limit.watch(client)
    METRICS.set_source(_C.counters)
    METRICS.set_runs(_C.program_runs)
    input_pipeline.watch()
    multiprocessing_reductions.register()
    checkpointing.watch()
    recurrent.register()
    layouts.register_others()
    atexit.register(exit_calls.finish)  # after those below
    atexit.register(_C.wait_for_autograd)
    atexit.register(builder.close)
    exit_checks.watch(device_count())
    return runtime


def _apply_config() -> None:
    if _state is not None:
        from tpu_core.recorder import checked

        tiers.choose(_state.client)
        checked.choose()


def _set_callbacks(client: Any, builder: Any) -> None:
    """Give the extension the functions of Python that it calls: ``callback("name")`` there."""
    from tpu_core import exit_calls, graph_capture, host_reads, interruptible, memory_limit
    from tpu_core.host_syncs import SYNCS
    from tpu_core.pjrt import client as pjrt
    from tpu_core.pjrt import jax_settings
    from tpu_core.pjrt import padded_array as arrays
    from tpu_core.recorder import checked, op_schema, signature

    devices = client.devices
    SYNCS.watch(devices)
    callbacks = {
        "describe": op_schema.describe,
        "miss": signature.new_signature,
        "jax_settings": jax_settings.code,
        **builder.callbacks(),
        "resume_collector": gc_control.resume,
        "out_of_memory": memory_limit.refuse_program,
        "check_allocation": memory_limit.check_allocation,
        "wait_for": interruptible.wait_for,
        "wait_until_ready": _wait_until_ready,
        "pack": lambda kind, data, device: pjrt.put_numbers(kind, data, devices[device]),
        "device_put": lambda tensor, device: pjrt.put_tensor(tensor, devices[device]),
        "move": lambda array, device: arrays.to_device(array, devices[device]),
        "padded_array": arrays.PaddedArray,
        "exact": lambda array, device: arrays.exact(array, devices[device]),
        "to_host": host_reads.to_host,
        "host_memory": pjrt.fetch,
        "copy_to_pinned": HOST_COPIES.start,
        "finish_host_copies": HOST_COPIES.finish,
        "note_read": host_reads.note_read,
        "memory_info": memory_info,
        "event_record": synchronization.Marker.record,
        "event_query": synchronization.Marker.query,
        "event_synchronize": synchronization.Marker.synchronize,
        "event_elapsed": synchronization.Marker.elapsed,
        "combine_words": checked.combination,
        "check_failed": checked.failure,
        "read_words": checked.read,
        "synchronize": synchronization.synchronize,
        "query": synchronization.query,
        "graph_failed": graph_capture.failed,
        "is_from_signal": interruptible.is_from_signal,
    }
    for name in ("miss", "compile", "new_state"):
        callbacks[name] = exit_calls.finished_at_exit(callbacks[name])
    for function in callbacks.values():
        _keep_dynamo_out(function)
    _C.set_callbacks(callbacks)


def _keep_dynamo_out(function: Callable[..., Any]) -> None:
    """Have Dynamo neither trace a function nor what it calls.

    After a graph break ops run while Dynamo looks at each frame that begins: it would take jax's
    tracing for the user's code, which costs seconds.
    """
    from torch._C._dynamo import eval_frame

    if code := getattr(function, "__code__", None):  # a class has none
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def join_world(join: Callable[[], None]) -> None:
    """Make the device one of a world of processes.

    Values that are on it already move over to the new client; arrays that `tpu_core.to_jax` gave
    stay on the former one.

    Args:
        join: Enters the world, so that the client that is started next spans it.

    Raises:
        ProcessGroupError: The device was used before, and is one that cannot be started again.
    """
    global _state
    with _lock:
        if not is_initialized():
            join()
            return
        assert _state is not None
        if _state.client.platform.name != "cpu":
            raise ProcessGroupError(
                "The device was used before the process group was made.",
                values={"platform": _state.client.platform.name},
                remedy="Call torch.distributed.init_process_group() before anything is put on the "
                "device.",
            )
        _restart(join)


def _restart(join: Callable[[], None]) -> None:
    global _state
    from tpu_core.compiler.builder import ProgramBuilder
    from tpu_core.pjrt import client as pjrt
    from tpu_core.pjrt import padded_array as arrays
    from tpu_core.verification import watch

    assert _state is not None
    former = _state
    for device in range(device_count()):
        synchronization.synchronize(device)
        _C.set_newest(device, None)
    join()
    client = pjrt.start()
    pjrt.put_numbers.cache_clear()
    builder = ProgramBuilder(client, former.store, watch)
    tiers.choose(client)
    _C.clear_programs()
    _set_callbacks(client, builder)
    former.builder.close()
    atexit.register(builder.close)
    _state = Runtime(client, builder, former.store)
    _C.replace_arrays(lambda array, device: pjrt.put(arrays.to_host(array), client.devices[device]))


def _keep_workers_quiet() -> None:
    """Silence jax's warning where `multiprocessing` forks, as a `DataLoader` does for each worker.

    Such a worker has no use for the device; one that uses it gets a `ForkedProcessError`.
    """
    warnings.filterwarnings(
        "ignore", r"os\.fork\(\) was called", RuntimeWarning, r"multiprocessing\.popen_fork"
    )


def runtime() -> Runtime:
    """The running device, started if need be.

    Returns:
        An object with ``builder``, whose ``provider(type)`` is the provider of a `Mode`, and
        ``client``, which has ``platform``; ``devices``, the JAX devices of ``tpu:0``, ``tpu:1`` and
        so on; ``members()``, the device of each process of a `World`; ``put(array, device)``, a
        numpy array on a device; ``exact(array, device)``, an argument of a program without padding;
        and ``has_fault(name)``.

    Example:
        >>> runtime().client.platform.name
        'cpu'
    """
    return initialize()


def _wait_until_ready(array: Any) -> None:
    """Wait for a result; what it failed with is raised where it is read."""
    from tpu_core.interruptible import wait_for

    with contextlib.suppress(Exception):
        wait_for(array)
        array.block_until_ready()


def memory_info(device: int) -> tuple[int, int]:
    """(free, total) bytes of a device; on the CPU platform the limit, or the machine's memory."""
    used = _C.allocated_bytes(device)
    limit = config().memory_limit
    if limit is None and is_initialized():
        stats = runtime().client.devices[device].memory_stats()
        if stats and "bytes_limit" in stats:
            limit, used = stats["bytes_limit"], stats.get("bytes_in_use", used)
    if limit is None:
        from tpu_core.pjrt.host_memory import host_memory

        limit = host_memory()
    return max(limit - used, 0), limit

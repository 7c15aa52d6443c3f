"""Programs that the devices of several processes run together, kept in the one executable cache."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_core import _C
from tpu_core.cache.fingerprint import fingerprint
from tpu_core.compiler.programs import require_compiling_allowed, source_versions
from tpu_core.compiler.reasons import listing
from tpu_core.compiler.segment import Segment, lower
from tpu_core.errors import map_xla_error
from tpu_core.metrics import METRICS, CompileEvent, Source
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import distributed

Outputs = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]


def obtain(
    runtime: Any,
    devices: Sequence[Any],
    name: str,
    module: Segment | Callable[[], str | bytes],
    outputs: Outputs = (),
) -> pjrt.Loaded:
    """A program for some devices of the world: from the cache folder, else compiled.

    Args:
        runtime: The running device; one of ``devices`` is its own.
        devices: JAX devices, of which device ``i`` is replica ``i`` of the program.
        name: Its name, with shapes and dtypes: ``"all_reduce sum float32[4]"``.
        module: Gives its StableHLO; or a segment that has collectives.
        outputs: Shape and dtype of each result; those of the segment where it is one.

    Raises:
        CompilationError: XLA refused it.
        RecompilationError: It would have to be compiled, and that is forbidden.

    Example:
        >>> outputs = [((4,), np.dtype(np.float32))]
        >>> loaded = obtain_program(runtime(), [device], "negate f32[4]", lambda: text, outputs)
        >>> (y,) = loaded.execute([x]).consume_with_handlers(loaded.handlers)
        >>> obtain_program(runtime(), devices, "a program with 2 collectives", segment)
    """
    if isinstance(module, Segment):
        return _obtain(
            runtime,
            devices,
            name,
            functools.partial(lower, module),
            module.outputs(),
            what=f"{module.text()} {module.constants()!r}",
            contents=listing(module),
            cut=module.cut,
        )
    return _obtain(runtime, devices, name, module, outputs)


def _obtain(
    runtime: Any,
    devices: Sequence[Any],
    name: str,
    module: Callable[[], str | bytes],
    outputs: Outputs,
    what: str | None = None,
    contents: Sequence[tuple[str, str]] | None = None,
    cut: str = "collective",
) -> pjrt.Loaded:
    """As `obtain`.

    Args:
        runtime, devices, name, module, outputs: As of `obtain`.
        what: A text that says what the module computes, where that is known without the module.
        contents: (line, name) of each of its ops; one of the name unless given.
        cut: Reason of its end.
    """
    client, store = runtime.client, runtime.store
    started = time.perf_counter()
    text = module() if what is None else None
    key = fingerprint(
        module=text if what is None else what,
        devices=[device.id for device in devices] if len(devices) > 1 else None,
        platform=client.version,
        versions=source_versions(),
    )
    executable = _load(store, key, devices, client)
    source: Source = "disk"
    line = _C.user_line()
    contents = contents or ((line or "", name),)
    if executable is None:
        require_compiling_allowed(f"{name} is new", 1, line)
        METRICS.cache_miss()
        source = "compiled"
        text = module() if text is None else text
        try:
            executable = distributed.compile_replicated(text, devices, client)
        except Exception as error:
            raise map_xla_error(error, op=name, line=line, stage="compile") from error
        _store(store, key, executable, name, client)
    own = next(d for d in devices if d in client.devices)
    loaded = pjrt.load(executable, outputs, own)
    METRICS.compiled(
        CompileEvent(
            time.perf_counter() - started,
            f"{name} over {len(devices)} devices is new" if len(devices) > 1 else f"{name} is new",
            source,
            len(contents),
            line,
            key,
            cut=cut,
            contents=tuple(contents),
        )
    )
    return loaded


def _load(store: Any, key: str, devices: Sequence[Any], client: pjrt.Client) -> Any:
    entry = store.get(key) if store else None
    if entry is None:
        return None
    try:
        return distributed.deserialize_replicated(entry.payload, devices, client)
    except Exception as error:
        warnings.warn(f"A cached executable could not be loaded: {error}", stacklevel=2)
        return None


def _store(store: Any, key: str, executable: Any, name: str, client: pjrt.Client) -> None:
    if store and (payload := pjrt.serialized_for_cache(executable)):
        store.put(key, payload, {"ops": 1, "names": name, "platform": client.version})

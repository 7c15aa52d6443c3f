"""Settings: a field of `Config` for each, with its variable, type, default and docs text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from tpu_core.config.kinds import (
    BOOL,
    BYTES,
    FOLDER,
    INDICES,
    PLATFORM,
    RATIO,
    SECONDS,
    SIZES,
    URL,
    VERIFY,
    Kind,
    choice,
    choice_or_plugin,
    integer,
)
from tpu_core.errors import ConfigurationError


def _user_cache() -> Path:
    # Imported here: at `import torch` nothing of this is needed.
    import platformdirs

    return Path(platformdirs.user_cache_dir("tpu-core", appauthor=False))


def _user_flights() -> Path:
    return _user_cache().with_name("tpu-flights")


def _setting(
    env: str,
    kind: Kind,
    doc: str,
    default: Any = None,
    *,
    shown: str | None = None,
    at_start: bool = False,
) -> Any:
    """A dataclass field with its environment variable, type, default and docs text.

    Args:
        env: Name of the variable.
        kind: Syntax of its value.
        doc: Text of the docs.
        default: Default value, or a function that gives it.
        shown: Default in the docs, where it is not the value.
        at_start: Whether it is read when the device starts, and at no other time.
    """
    metadata = {
        "env": env,
        "kind": kind,
        "doc": doc,
        "shown": shown or _show(default),
        "at_start": at_start,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _show(value: Any) -> str:
    return "unset" if value is None else f"`{value}`"


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings. Read them with `config`, change them for a block with `override`.

    Raises:
        ConfigurationError: A value is not valid; the message lists what is.

    Example:
        >>> config().fallback
        'warn'
    """

    platform: str | None = _setting(
        "TPU_PLATFORM",
        PLATFORM,
        "PJRT platform behind the device `tpu`: a TPU where one is visible, else XLA's CPU.",
        shown="`auto`",
        at_start=True,
    )
    num_devices: int | None = _setting(
        "TPU_NUM_DEVICES",
        integer(1),
        "Number of devices that the CPU platform shows.",
        shown="`1`",
        at_start=True,
    )
    visible_devices: tuple[int, ...] | None = _setting(
        "TPU_VISIBLE_DEVICES",
        INDICES,
        "Devices to use, in this order.",
        shown="all",
        at_start=True,
    )
    eager_mode: str | None = _setting(
        "TPU_EAGER_MODE",
        choice_or_plugin("tpu_core.modes", "debug", "strict", "fused"),
        "Execution of ops outside `torch.compile`: one at a time and wait (debug), one at a "
        "time (strict), or recorded and run as one program (fused); or a mode of another package.",
        shown="`fused` with tpu-eager, else `strict`",
    )
    fallback: str = _setting(
        "TPU_FALLBACK",
        choice("warn", "error", "allow"),
        "Handling of an op without a lowering: run on the CPU and warn once, raise, or run on the "
        "CPU in silence.",
        "warn",
    )
    cache_dir: Path = _setting(
        "TPU_CACHE_DIR",
        FOLDER,
        "Folder of the executable cache. Entries are executable code: it must be yours alone.",
        _user_cache,
        shown="`tpu-core` in the user's cache folder",
        at_start=True,
    )
    cache_size: int = _setting(
        "TPU_CACHE_SIZE",
        BYTES,
        "Size that the cache folder is kept under; least recently used entries go first.",
        10 << 30,
        shown="`10G`",
        at_start=True,
    )
    cache: str = _setting(
        "TPU_CACHE",
        choice("on", "off"),
        "Keep executables beyond the process, on disk and in the shared cache.",
        "on",
        at_start=True,
    )
    cache_url: str | None = _setting(
        "TPU_CACHE_URL",
        URL,
        "Cache that many machines share, behind the folder: any URL of fsspec. Entries are "
        "executable code: name only what you trust.",
        at_start=True,
    )
    cache_timeout: float = _setting(
        "TPU_CACHE_TIMEOUT",
        SECONDS,
        "Longest wait for the shared cache, in seconds: of a read, and for uploads at the exit.",
        10.0,
        shown="`10`",
        at_start=True,
    )
    memory_limit: int | None = _setting(
        "TPU_MEMORY_LIMIT",
        BYTES,
        "Simulated memory of a device on the CPU platform, to find out what fits.",
    )
    keep_memory: bool = _setting(
        "TPU_KEEP_MEMORY",
        BOOL,
        "On the CPU platform, keep freed memory in the process instead of giving it back to the "
        "system after each program, up to a sixteenth of the machine's; glibc's allocator only.",
        True,
        shown="`1`",
        at_start=True,
    )
    segment_ops: int = _setting(
        "TPU_SEGMENT_OPS", integer(1), "Most ops in one recorded segment in fused mode.", 2_000
    )
    buckets: tuple[int, ...] = _setting(
        "TPU_BUCKETS",
        SIZES,
        "Sizes that varying sizes are padded to; one beyond the last is padded to a power of two, "
        "or three quarters of it.",
        (),
        shown="powers of two and, from 96 on, three quarters of them",
    )
    tiers: str = _setting(
        "TPU_TIERS",
        choice("auto", "compiled", "host"),
        "On the CPU platform, the tier of an op outside `torch.compile`: PyTorch's CPU kernel at "
        "first and a program once that pays, programs alone, as on a TPU, or CPU kernels wherever "
        "there is one.",
        "auto",
        at_start=True,
    )
    checks: str = _setting(
        "TPU_CHECKS",
        choice("default", "all", "off"),
        "Values that a program checks as PyTorch's CPU kernels do; the next read raises the "
        "error. `default`: indices, class labels, probabilities and parameters of random ops. "
        "`all`: integer divisors, too.",
        "default",
        at_start=True,
    )
    verify: str = _setting(
        "TPU_VERIFY",
        VERIFY,
        "Runs of programs that are repeated op by op on the host and compared: none, the first of "
        "each program, or one in N.",
        "off",
    )
    tier_patience: float = _setting(
        "TPU_TIER_PATIENCE",
        RATIO,
        "With `TPU_TIERS=auto`, how many times the estimated cost of a program the CPU kernels of "
        "its ops may take before it is made.",
        3.0,
        shown="`3`",
    )
    compile: str = _setting(
        "TPU_COMPILE",
        choice("blocking", "background"),
        "Compilation of a new segment in fused mode: wait for its program, or run op by op where "
        "nearly all its ops have been compiled one by one, while another process compiles it.",
        "background",
    )
    compile_workers: int = _setting(
        "TPU_COMPILE_WORKERS",
        integer(1),
        "Most processes that compile in the background.",
        lambda: max(1, (os.cpu_count() or 1) // 8),
        shown="an eighth of the cores",
    )
    recompile_limit: int = _setting(
        "TPU_RECOMPILE_LIMIT",
        integer(0),
        "Most programs compiled for the ops that end at one line while they differ from step to "
        "step. Beyond, what differs runs by CPU kernels, as few ops before a read do at first; 0 "
        "has programs alone.",
        8,
    )
    performance_warnings: bool = _setting(
        "TPU_PERFORMANCE_WARNINGS",
        BOOL,
        "Warn once about causes of slow steps: reads from the device in every step, a device that "
        "waits for its `DataLoader`, and ops that differ from step to step.",
        True,
        shown="`1`",
    )
    debug_nans: bool = _setting(
        "TPU_DEBUG_NANS",
        BOOL,
        "Raise at the first op that produces a NaN or an infinity: in Debug mode at once, in the "
        "others when the program that holds the op has run.",
        False,
        shown="`0`",
    )
    docs_url: str | None = _setting(
        "TPU_DOCS_URL",
        URL,
        "Where the documentation is published, for the links in errors; that of the release unless "
        "set.",
    )
    dump_dir: Path | None = _setting(
        "TPU_DUMP",
        FOLDER,
        "Folder for dumps: each graph of `torch.compile` as Python, and each program as "
        "StableHLO and as XLA optimized it.",
    )
    collectives_span: str = _setting(
        "TPU_COLLECTIVES_SPAN",
        choice("auto", "group", "slice"),
        "Devices that programs of a sub-group's collectives span: its own, or all of the "
        "slice, so that all ranks call them together. `auto` chooses `slice` where libtpu refuses "
        "programs for some of the chips: on v5e and v6e with more than 8.",
        "auto",
    )
    flight_records: int = _setting(
        "TPU_FLIGHT_RECORDS",
        integer(1),
        "Last collectives of each process that are kept in mind, for `tpu flights`.",
        1000,
    )
    flight_dir: Path = _setting(
        "TPU_FLIGHT_DIR",
        FOLDER,
        "Folder for the last collectives of each process, a folder a run, where one fails.",
        _user_flights,
        shown="`tpu-flights` in the user's cache folder",
    )
    log_level: str = _setting(
        "TPU_LOG",
        choice("warning", "info", "debug"),
        "Level of the logger `tpu_core`; `info` prints a line for each compile.",
        "warning",
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            spec = SPECS[name]
            if value is None and spec.default is None:
                continue
            text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
            # Written back so that override(cache_size="500M") means what the variable means.
            object.__setattr__(self, name, _parse(name, text))


@dataclass(frozen=True)
class Setting:
    """Description of one field: see `settings`."""

    name: str
    env: str
    kind: Kind
    doc: str
    shown: str
    default: Any
    at_start: bool


def settings() -> list[Setting]:
    """Every field with its environment variable, type, docs text and default."""
    return list(SPECS.values())


SPECS: dict[str, Setting] = {
    f.name: Setting(
        name=f.name,
        default=f.default_factory if f.default is MISSING else f.default,
        **f.metadata,
    )
    for f in fields(Config)
}


def _parse(name: str, text: str) -> Any:
    spec = SPECS[name]
    try:
        return spec.kind.parse(text.strip())
    except (ValueError, KeyError):
        valid = ", ".join([spec.kind.valid, *spec.kind.installed()])
        raise ConfigurationError(
            f"{spec.env}={text!r} is not valid.", values={"valid": valid}
        ) from None


def from_environment(environ: Mapping[str, str]) -> Config:
    """The configuration that an environment describes. An empty variable counts as unset.

    Raises:
        ConfigurationError: A variable has a value that is not valid.
    """
    given = {
        spec.name: _parse(spec.name, environ[spec.env])
        for spec in settings()
        if environ.get(spec.env, "").strip()
    }
    return Config(**given)

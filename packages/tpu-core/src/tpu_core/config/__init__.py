"""Configuration: one frozen dataclass, read once from the ``TPU_*`` environment variables.

Everything reads `config()`; `override` changes fields for a block of code. The fields are in
``config/fields.py``; the docs table (``config/page.py``) and ``tpu doctor`` are made from them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from tpu_core.config.fields import SPECS
from tpu_core.config.fields import Config as Config
from tpu_core.config.fields import Setting as Setting
from tpu_core.config.fields import from_environment as from_environment
from tpu_core.config.fields import settings as settings
from tpu_core.errors import ConfigurationError

_overridden: ContextVar[Config | None] = ContextVar("tpu_config", default=None)
_lock = threading.Lock()
_base: Config | None = None
_on_memory_limit: Callable[[bool], None] | None = None
_on_reload: Callable[[], None] | None = None
_at_start: Config | None = None  # read by the device, once it has started
_memory_limits = 0  # overrides in force that limit memory, of any thread


def _renew_lock() -> None:
    """In a forked child: a thread that is not in it may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def started() -> None:
    """Take note that the device has started: `override` then refuses what is read at the start."""
    global _at_start
    _at_start = config()


def on_memory_limit(function: Callable[[bool], None]) -> None:
    """Have a function called at once and whenever memory limits come or go.

    Args:
        function: Takes whether a configuration in force limits memory, in any thread.
    """
    global _on_memory_limit
    with _lock:
        _on_memory_limit = function
        _announce_limits()


def on_reload(function: Callable[[], None]) -> None:
    """Have a function called whenever the environment was read again.

    Args:
        function: Puts settings into force that are no question of `config`.
    """
    global _on_reload
    _on_reload = function


def _announce_limits() -> None:
    """With `_lock` held."""
    if _on_memory_limit is not None:
        base = _base is not None and _base.memory_limit is not None
        _on_memory_limit(base or _memory_limits > 0)


def _count_limit(change: int) -> None:
    global _memory_limits
    with _lock:
        _memory_limits += change
        _announce_limits()


def config() -> Config:
    """The configuration in force: the innermost `override`, else the environment's (read once).

    Raises:
        ConfigurationError: A ``TPU_*`` variable has a value that is not valid.
    """
    return _overridden.get() or _base or _read()


def _read() -> Config:
    global _base
    with _lock:
        if _base is None:
            _base = from_environment(os.environ)
            _announce_limits()
        return _base


def reload() -> Config:
    """Read the environment again, for tests and for programs that set variables late.

    What was decided already (the platform, the cache folder) does not change; the tiers do.
    """
    global _base
    with _lock:
        _base = None
    configuration = _read()
    if _on_reload is not None:
        _on_reload()
    return configuration


@contextmanager
def left_unread() -> Iterator[None]:
    """Have the environment read again after a block, where it was not read before.

    A process that forks before it uses the device has not chosen for its children yet.
    """
    global _base
    unread = _base is None
    try:
        yield
    finally:
        if unread:
            with _lock:
                _base = None


@contextmanager
def override(**changes: Any) -> Iterator[Config]:
    """Change fields of the configuration for a block, in this thread or async task only.

    Args:
        **changes: Fields of `Config`, as values or written as in the environment.

    Raises:
        ConfigurationError: A field does not exist, its value is not valid, or it is read when the
            device starts, and the device has started with another value.

    Example:
        >>> with override(fallback="error", memory_limit="16G"):
        ...     train()
    """
    unknown = sorted(set(changes) - set(SPECS))
    if unknown:
        raise ConfigurationError(
            f"There is no setting {', '.join(map(repr, unknown))}.",
            values={"valid": ", ".join(sorted(SPECS))},
            remedy="Use one of the names above.",
        )
    before = config()
    changed = replace(before, **changes)
    if _at_start is not None:
        _refuse_late(changes, before, changed)
    limits = changed.memory_limit is not None
    if limits:
        _count_limit(1)
    token = _overridden.set(changed)
    try:
        yield changed
    finally:
        _overridden.reset(token)
        if limits:
            _count_limit(-1)


def _refuse_late(names: Iterable[str], before: Config, changed: Config) -> None:
    """Refuse changes that the device, which has started, would not see."""
    late = {
        SPECS[name].env: getattr(changed, name)
        for name in names
        if SPECS[name].at_start
        and getattr(changed, name) not in (getattr(before, name), getattr(_at_start, name))
    }
    if late:
        raise ConfigurationError(
            "The device has started, and settings that it reads then cannot be changed.",
            values=late,
            remedy="Set the variable, or override the setting where the device is first used.",
        )

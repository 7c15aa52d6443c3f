"""The checks of ``tpu doctor`` that look at the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tpu_core.cache import ExecutableStore, SharedTier
from tpu_core.cli.check import Check
from tpu_core.config import Config, config
from tpu_core.errors import ConfigurationError, format_bytes


def check_cache() -> Iterator[Check]:
    """The cache: whether it can be used, and the size of the folder."""
    section = "Cache"
    try:
        settings = config()
    except ConfigurationError:
        return
    if settings.cache == "off":
        yield Check(section, "disk cache", "off (TPU_CACHE=off)")
        return
    yield _shared_cache(section, settings)
    store = ExecutableStore(settings.cache_dir, settings.cache_size)
    folder = str(store.directory)
    if refusal := store.refusal():
        remedy = "Set TPU_CACHE_DIR to a folder of your own, or `chmod 700` this one."
        yield Check(section, "folder", f"{folder} {refusal}", "warning", remedy)
        return
    if not _writable(store.directory):
        remedy = "Fix its permissions, or set TPU_CACHE_DIR to a folder of your own."
        yield Check(section, "folder", f"{folder} cannot be written", "warning", remedy)
    else:
        yield Check(section, "folder", f"{folder} (writable)")
    size = f"{format_bytes(store.size())} of {format_bytes(store.size_limit)}"
    yield Check(section, "size", f"{len(store.ls())} entries, {size}")


def _shared_cache(section: str, settings: Config) -> Check:
    if settings.cache_url is None:
        return Check(section, "shared", "off (TPU_CACHE_URL names none)")
    tier = SharedTier(settings.cache_url, settings.cache_timeout)
    if problem := tier.problem():
        remedy = "Check TPU_CACHE_URL, the network and your credentials."
        return Check(
            section, "shared", f"{tier.shown} cannot be read ({problem})", "warning", remedy
        )
    return Check(section, "shared", f"{tier.shown} (readable)")


def _writable(folder: Path) -> bool:
    """Return whether the folder, or the nearest parent that exists, can be written."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)

"""The tiers behind memory: the disk, then the shared store where one is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from tpu_core.cache.fingerprint import fingerprint
from tpu_core.cache.shared import SharedTier
from tpu_core.cache.store import Entry, ExecutableStore, StoreCounts
from tpu_core.config import Config


class TieredStore:
    """An `ExecutableStore` with a `SharedTier` behind it.

    What is found in the shared tier is written to disk; what is put goes to disk at once and to
    the shared tier in the background.

    Args:
        disk: The folder of this machine.
        shared: The store of many machines.

    Example:
        >>> store = TieredStore(ExecutableStore(folder, 10 << 30), SharedTier(url, timeout=10))
        >>> store.get(key) is None
        True
    """

    def __init__(self, disk: ExecutableStore, shared: SharedTier) -> None:
        self.disk = disk
        self.shared = shared

    @property
    def counts(self) -> StoreCounts:
        """Counters of the disk tier."""
        return self.disk.counts

    def get(self, key: str) -> Entry | None:
        """The entry of ``key`` from the nearest tier that has it, or None."""
        entry = self.disk.get(key)
        if entry is None:
            entry = self.shared.get(key)
            if entry is not None:
                self.disk.put(key, entry.payload, entry.manifest)
        return entry

    def put(self, key: str, payload: bytes, manifest: dict[str, Any]) -> bool:
        """Store an entry in both tiers; whether the disk has it."""
        stored = self.disk.put(key, payload, manifest)
        self.shared.put(key, payload, manifest)
        return stored

    def publish(self, keys: Iterable[str]) -> int:
        """Upload entries that only the disk has, in the background.

        Args:
            keys: Keys of the entries; those that the disk lacks are passed over.

        Returns:
            Number of uploads that were begun.
        """
        begun = 0
        for key in keys:
            if not self.shared.has(key) and (entry := self.disk.get(key)) is not None:
                self.shared.put(key, entry.payload, entry.manifest)
                begun += 1
        return begun


def open_store(settings: Config) -> ExecutableStore | TieredStore | None:
    """The store that the configuration describes, or None where it is off."""
    if settings.cache == "off":
        return None
    disk = ExecutableStore(settings.cache_dir, settings.cache_size)
    if settings.cache_url is None:
        return disk
    return TieredStore(disk, SharedTier(settings.cache_url, settings.cache_timeout))


def remembered_names(
    store: ExecutableStore | TieredStore | None, compute: Callable[[], list[str]], **key: Any
) -> list[str]:
    """Result of ``compute``, kept on this machine's disk.

    Args:
        store: Store to keep it in; None computes it.
        compute: Gives a list of names that only depends on ``key``.
        **key: What it depends on.
    """
    disk = store.disk if isinstance(store, TieredStore) else store
    if disk is None:
        return compute()
    name = fingerprint(**key)
    entry = disk.get(name)
    if entry is not None:
        try:
            names = json.loads(entry.payload)
        except ValueError:
            names = None
        if isinstance(names, list) and all(isinstance(n, str) for n in names):
            return names
    names = compute()
    disk.put(name, json.dumps(names).encode(), {"names": f"{len(names)} overloads to register"})
    return names

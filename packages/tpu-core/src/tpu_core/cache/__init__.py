"""The executable cache: on disk, and optionally shared by many machines."""

from __future__ import annotations

from tpu_core.cache.fingerprint import fingerprint as fingerprint
from tpu_core.cache.shared import SharedTier as SharedTier
from tpu_core.cache.store import Entry as Entry
from tpu_core.cache.store import EntryInfo as EntryInfo
from tpu_core.cache.store import ExecutableStore as ExecutableStore
from tpu_core.cache.store import Problem as Problem
from tpu_core.cache.tiers import TieredStore as TieredStore
from tpu_core.cache.tiers import open_store as open_store

__all__ = [
    "Entry",
    "EntryInfo",
    "ExecutableStore",
    "Problem",
    "SharedTier",
    "TieredStore",
    "fingerprint",
    "open_store",
]

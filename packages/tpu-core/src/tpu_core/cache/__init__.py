"""The executable cache on disk."""

from __future__ import annotations

from tpu_core.cache.fingerprint import fingerprint as fingerprint
from tpu_core.cache.store import Entry as Entry
from tpu_core.cache.store import EntryInfo as EntryInfo
from tpu_core.cache.store import ExecutableStore as ExecutableStore
from tpu_core.cache.store import Problem as Problem

__all__ = ["Entry", "EntryInfo", "ExecutableStore", "Problem", "fingerprint"]

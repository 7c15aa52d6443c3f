"""A folder of compiled executables that any number of processes share.

One file an entry, written under a temporary name and renamed, so that a reader sees a whole entry
or none, whatever else is writing. Entries are executable code: the folder must belong to the user
and be writable by that user alone, or it is not used at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_core.cache.entry import (
    CorruptEntryError,
    Entry,
    encode,
    open_entry,
    owned,
    read_entry,
    read_header,
)
from tpu_core.errors import CacheWarning, format_bytes

_SUFFIX = ".tpux"
_TEMPORARY = ".tmp-"
# A writer needs seconds; what is older was left behind by a process that died.
_STALE_SECONDS = 3600.0
# Evicting somewhat more than needed keeps the folder from being scanned at every put.
_EVICT_TO = 0.9


@dataclass(frozen=True)
class EntryInfo:
    """One row of `ExecutableStore.ls`.

    Attributes:
        path: The file.
        key: Key it was stored under.
        size: Bytes on disk.
        last_used: Seconds since the epoch.
        manifest: The manifest that was stored with it.
    """

    path: Path
    key: str
    size: int
    last_used: float
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A file that `ExecutableStore.verify` found damaged, and what is wrong with it."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


@dataclass
class StoreCounts:
    """Counters of one `ExecutableStore`."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    dropped: int = 0
    evicted: int = 0


class ExecutableStore:
    """Executables by key in ``directory``, kept under ``size_limit`` bytes.

    Where the folder cannot be trusted or written, one `CacheWarning` says so, `get` finds nothing
    and `put` does nothing: programs then live in memory only.

    Args:
        directory: The folder; created with mode 0700 at the first `put`.
        size_limit: Bytes; the least recently used entries are removed beyond it. 0 stores none.

    Attributes:
        counts: Hits, misses, puts, entries dropped and evicted by this object.

    Example:
        >>> store = ExecutableStore(config().cache_dir, config().cache_size)
        >>> store.put(key, loaded.serialize(), {"ops": 57})
        True
        >>> store.get(key).manifest
        {'ops': 57}
    """

    def __init__(self, directory: str | os.PathLike[str], size_limit: int) -> None:
        self.directory = Path(directory)
        self.size_limit = size_limit
        self.counts = StoreCounts()
        self._lock = threading.Lock()
        self._trusted: bool | None = None
        self._writable = True
        self._corrupt_warned = self._too_large_warned = False
        # Bytes in the folder as far as known; None before the first scan.
        self._size: int | None = None
        self._written_since_scan = 0

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.directory / relative_path(key)

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``, or None. A damaged entry is removed, with one `CacheWarning`."""
        if not self._usable():
            return None
        path = self.path(key)
        try:
            header, payload = read_entry(path, key)
        except FileNotFoundError:
            self._add(misses=1)
            return None
        except CorruptEntryError as error:
            self._drop(path, str(error))
            return None
        # The time of last use, which eviction goes by; a lost race or a read-only folder is fine.
        with contextlib.suppress(OSError):
            os.utime(path)
        self._add(hits=1)
        return Entry(header.manifest, payload)

    def put(self, key: str, payload: bytes, manifest: dict[str, Any]) -> bool:
        """Store an entry; of two processes that store one key at once, either one's stays.

        Returns:
            Whether it was stored. It is not where the folder cannot be used, or where the entry is
            larger than the store's limit; the first such entry gives a `CacheWarning`.

        Raises:
            TypeError: The manifest is not JSON.
        """
        head = encode(key, payload, manifest)
        size = len(head) + len(payload)
        if size > self.size_limit:
            self._refuse_large(size)
            return False
        if not self._usable(create=True) or not self._writable:
            return False
        path = self.path(key)
        try:
            try:
                self._write(path, head, payload)
            except FileNotFoundError:  # the folder was removed meanwhile
                self._write(path, head, payload)
        except OSError as error:
            self._writable = False
            self._warn(
                f"The cache folder {self.directory} cannot be written ({error.strerror}); new "
                "programs are kept in memory only.",
                "Free space or fix its permissions, or set TPU_CACHE_DIR to a folder of your own.",
            )
            return False
        with self._lock:
            self.counts.puts += 1
            self._written_since_scan += size
            # Other processes write too, so the size is counted anew after a tenth of the limit.
            rescan = self._size is None or self._written_since_scan > self.size_limit // 10
            if self._size is not None:
                self._size += size
        if rescan or (self._size or 0) > self.size_limit:
            self._evict()
        return True

    def ls(self) -> list[EntryInfo]:
        """Every readable entry, the most recently used first; payloads are not read."""
        found = []
        for path in self._files():
            try:
                with open_entry(path) as file:
                    status = os.fstat(file.fileno())
                    header = read_header(file, status.st_size)
            except (OSError, CorruptEntryError):
                continue
            found.append(
                EntryInfo(path, header.key, status.st_size, status.st_mtime, header.manifest)
            )
        return sorted(found, key=lambda info: -info.last_used)

    def verify(self) -> list[Problem]:
        """Read every entry in full and report those that are damaged; nothing is removed.

        A folder that cannot be used is reported as the one problem.
        """
        refusal = self.refusal()
        if refusal:
            return [Problem(self.directory, refusal)]
        problems = []
        for path in self._files():
            try:
                header, _ = read_entry(path)
                if self.path(header.key) != path:
                    raise CorruptEntryError("belongs to another key")
            except FileNotFoundError:
                continue
            except CorruptEntryError as error:
                problems.append(Problem(path, str(error)))
        return problems

    def prune(
        self, *, size: int | None = None, age: float | None = None, all: bool = False
    ) -> tuple[int, int]:
        """Remove entries, least recently used first.

        Args:
            size: Bytes to come down to.
            age: Remove what was not used for so many seconds.
            all: Remove everything.

        Returns:
            Number of entries and bytes removed.
        """
        if self.refusal():
            return 0, 0
        self._remove_stale()
        files = self._by_last_use()
        total = sum(n for _, n, _ in files)
        now = time.time()
        removed = freed = 0
        for used, n, path in files:
            old = age is not None and now - used > age
            if not (all or old or (size is not None and total > size)):
                continue
            if _unlink(path):
                removed, freed = removed + 1, freed + n
            total -= n
        with self._lock:
            self._size, self._written_since_scan = total, 0
        return removed, freed

    def size(self) -> int:
        """Bytes of all entries in the folder, counted now."""
        return sum(n for _, n, _ in self._by_last_use())

    def refusal(self) -> str | None:
        """Reason that the folder is not used, or None where it may be (it need not exist yet)."""
        try:
            status = os.stat(self.directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot be used ({error.strerror})"
        if not stat.S_ISDIR(status.st_mode):
            return "is not a folder"
        if not owned(status):
            return "belongs to another user"
        if os.name == "posix" and stat.S_IMODE(status.st_mode) & 0o022:
            return "can be written by other users"
        return None

    def _usable(self, create: bool = False) -> bool:
        """Return whether the folder may be used; decided once, when it is first there."""
        if self._trusted is not None:
            return self._trusted
        problem = self.refusal()
        if problem is None and not self.directory.is_dir():
            if not create:
                return True
            problem = self._create()
        self._trusted = problem is None
        if problem:
            remedy = "Set TPU_CACHE_DIR to a folder of your own, or TPU_CACHE=off."
            if "can be written" in problem:
                remedy = (
                    f"Run `chmod 700 {self.directory}`, or set TPU_CACHE_DIR to another folder."
                )
            self._warn(
                f"The cache folder {self.directory} {problem}; programs are kept in memory only.",
                remedy,
            )
        return self._trusted

    def _create(self) -> str | None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot be created ({error.strerror})"
        return self.refusal()

    def _write(self, path: Path, head: bytes, payload: bytes) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # mkstemp makes the file 0600. No fsync: after a crash the checksum finds a torn file.
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(head)
                file.write(payload)
            os.replace(name, path)
        except BaseException:
            _unlink(Path(name))
            raise

    def _refuse_large(self, size: int) -> None:
        """Say once that an entry does not fit; a limit of 0 is meant."""
        with self._lock:
            first, self._too_large_warned = not self._too_large_warned, True
        if first and self.size_limit:
            self._warn(
                f"A program of {format_bytes(size)} is larger than the cache folder's limit of "
                f"{format_bytes(self.size_limit)} and is not stored there: the next process has to "
                "compile it again.",
                "Set TPU_CACHE_SIZE to several times the program's size.",
            )

    def _drop(self, path: Path, what: str) -> None:
        _unlink(path)
        self._add(misses=1, dropped=1)
        with self._lock:
            first, self._corrupt_warned = not self._corrupt_warned, True
        if first:
            self._warn(
                f"The cache entry {path} {what}; it was dropped and is compiled again.",
                "Nothing, if this is rare. `tpu cache verify` checks the other entries.",
            )

    def _evict(self) -> None:
        size = self.size()
        with self._lock:
            self._size, self._written_since_scan = size, 0
        if size > self.size_limit:
            removed, _ = self.prune(size=int(self.size_limit * _EVICT_TO))
            self._add(evicted=removed)

    def _files(self, prefix: str = "", suffix: str = _SUFFIX) -> Iterator[Path]:
        """Entries in the two-character folders; what vanishes meanwhile is left out."""
        for shard in _listing(self.directory):
            if len(shard.name) == 2 and shard.is_dir(follow_symlinks=False):
                for file in _listing(Path(shard.path)):
                    if file.name.startswith(prefix) and file.name.endswith(suffix):
                        yield Path(file.path)

    def _by_last_use(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.lstat()
                found.append((status.st_mtime_ns / 1e9, status.st_size, path))
        return sorted(found)

    def _remove_stale(self) -> None:
        for path in self._files(prefix=_TEMPORARY, suffix=""):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE_SECONDS:
                    _unlink(path)

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, n in counts.items():
                setattr(self.counts, name, getattr(self.counts, name) + n)

    def _warn(self, what: str, remedy: str) -> None:
        warnings.warn(CacheWarning(what, remedy=remedy), stacklevel=4)


def relative_path(key: str) -> str:
    """Path of a key's entry in a cache; keys are hashed: any text is a safe file name."""
    name = hashlib.sha256(key.encode()).hexdigest()
    return f"{name[:2]}/{name[2:]}{_SUFFIX}"


def _listing(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _unlink(path: Path) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True

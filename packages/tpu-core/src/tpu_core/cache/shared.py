"""The shared tier: entries at an fsspec URL, read by many hosts, written in the background.

A store that does not answer must not cost the user's program more than a bounded wait: reads have a
time limit, uploads have a thread of their own, and after a failure the store is left alone for a
while. Nothing here raises into the caller.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tpu_core.cache.entry import CorruptEntryError, Entry, decode, encode
from tpu_core.cache.store import relative_path
from tpu_core.errors import CacheWarning

_T = TypeVar("_T")
# Seconds that a store which failed is left alone; doubled at each further failure.
_FIRST_PAUSE = 60.0
# Seconds between attempts to write while the interpreter ends.
_PAUSES = (0.1, 1.0, 5.0)
# Payloads that wait for their upload; more than that would fill memory where uploads are slow.
_MOST_PENDING_BYTES = 1 << 30
# A missing folder of these is a missing bucket, which is not ours to create.
_BUCKETS = frozenset("s3 s3a gs gcs az abfs abfss adl oci oss".split())
_LOCAL = frozenset(("file", "local"))
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


@dataclass
class SharedCounts:
    """Counters of one `SharedTier`; ``given_up`` are uploads that were not made."""

    hits: int = 0
    misses: int = 0
    uploads: int = 0
    damaged: int = 0
    given_up: int = 0


class SharedTier:
    """Entries by key under a URL that fsspec can open; safe to use from any thread.

    The first failure gives one `CacheWarning`; later ones are silent.

    Args:
        url: ``s3://bucket/folder``, ``gs://...``, ``file:///mnt/...``: any URL of fsspec.
        timeout: Seconds that one read may take, and the uploads still pending at the exit.

    Attributes:
        counts: Hits, misses, uploads, damaged entries and uploads given up by this object.

    Example:
        >>> tier = SharedTier("s3://bucket/programs", timeout=10)
        >>> tier.put(key, loaded.serialize(), {"ops": 57})
        >>> tier.flush()
        True
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.counts = SharedCounts()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._filesystem: tuple[Any, str] | None = None
        self._uploads: queue.SimpleQueue[tuple[str, bytes, dict[str, Any]]] = queue.SimpleQueue()
        self._uploader: threading.Thread | None = None
        self._pending = self._pending_bytes = 0
        self._idle = threading.Condition(self._lock)
        self._warned = False
        self._rest = {"read": _Rest(), "written": _Rest()}

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``, or None where there is none, it is damaged or nothing answers."""
        if self._rest["read"].now():
            return None
        try:
            data = self._within_timeout(lambda: self._read(key))
        except FileNotFoundError:
            self._add(misses=1)
            return None
        except Exception as error:
            self._failed("read", error)
            return None
        try:
            header, payload = decode(data, key)
        except CorruptEntryError as error:
            # The program is compiled and its upload replaces the entry.
            self._add(misses=1, damaged=1)
            self._warn(
                f"An entry of the shared cache {self.shown} {error}; it is compiled again.",
                "Nothing, if this is rare. Otherwise find the other writers.",
            )
            return None
        self._add(hits=1)
        return Entry(header.manifest, payload)

    def put(self, key: str, payload: bytes, manifest: dict[str, Any]) -> None:
        """Upload an entry in the background; returns at once."""
        with self._lock:
            full = self._pending_bytes + len(payload) > _MOST_PENDING_BYTES
            if full or self._rest["written"].now():
                self.counts.given_up += 1
                return
            self._pending += 1
            self._pending_bytes += len(payload)
            start = self._uploader is None
            if start:
                # A daemon, as a store that hangs must not keep the process alive.
                self._uploader = threading.Thread(
                    target=self._upload_all, name="tpu-cache-upload", daemon=True
                )
        if start:
            self._uploader.start()  # type: ignore[union-attr]
            _at_exit(self._finish)
        self._uploads.put((key, payload, manifest))

    def has(self, key: str) -> bool:
        """Return whether there is an entry of ``key``; not where nothing answers."""
        if self._rest["read"].now():
            return False
        try:
            return self._within_timeout(lambda: self._exists(key))
        except Exception as error:
            self._failed("read", error)
            return False

    def problem(self) -> str | None:
        """Error that reading the store raises now, or None: a look-up of an entry that is not
        there.
        """
        try:
            self._within_timeout(lambda: self._read("tpu doctor"))
        except FileNotFoundError:
            return None
        except Exception as error:
            return self._text(error)
        return None

    @property
    def shown(self) -> str:
        """The URL without credentials."""
        return without_credentials(self.url)

    @staticmethod
    def _text(error: Exception) -> str:
        return without_credentials(f"{type(error).__name__}: {error}")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for the uploads, ``timeout`` seconds at most; whether none is pending."""
        with self._idle:
            return self._idle.wait_for(
                lambda: not self._pending, self.timeout if timeout is None else timeout
            )

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has no such thread, and perhaps a lock that is never opened
        if not self.flush():
            self._warn(
                f"{self._pending} programs were not stored in the shared cache {self.shown}: "
                f"they were not there {self.timeout:g} s after the program's end.",
                "Check the connection, or give it more time with TPU_CACHE_TIMEOUT.",
            )

    def _upload_all(self) -> None:
        while True:
            key, payload, manifest = self._uploads.get()
            try:
                if self._rest["written"].now():
                    self._add(given_up=1)
                else:
                    self._write_at_last(key, encode(key, payload, manifest) + payload)
                    self._add(uploads=1)
            except Exception as error:
                self._add(given_up=1)
                with contextlib.suppress(Warning):  # where warnings are errors
                    self._failed("written", error)
            finally:
                with self._idle:
                    self._pending -= 1
                    self._pending_bytes -= len(payload)
                    self._idle.notify_all()

    def _within_timeout(self, call: Callable[[], _T]) -> _T:
        """Result or error of ``call``, or `TimeoutError`: no filesystem has a common limit."""
        done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((call(), None))
            except Exception as error:
                done.put((None, error))

        threading.Thread(target=run, name="tpu-cache-read", daemon=True).start()
        try:
            result, error = done.get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer in {self.timeout:g} s") from None
        if error is not None:
            raise error
        return result

    def _open(self) -> tuple[Any, str]:
        with self._opening:
            if self._filesystem is None:
                from fsspec.core import url_to_fs

                filesystem, root = url_to_fs(self.url)
                self._filesystem = filesystem, root.rstrip("/")
            return self._filesystem

    def _read(self, key: str) -> bytes:
        filesystem, root = self._open()
        data: bytes = filesystem.cat_file(f"{root}/{relative_path(key)}")
        return data

    def _exists(self, key: str) -> bool:
        filesystem, root = self._open()
        return bool(filesystem.exists(f"{root}/{relative_path(key)}"))

    def _write_at_last(self, key: str, data: bytes) -> None:
        for pause in (*_PAUSES, None):
            try:
                return self._write(key, data)
            except RuntimeError as error:
                # Python 3.12 starts no thread while the interpreter ends. One that an asynchronous
                # filesystem has is free once its last calls are done: this one is among them, its
                # executor has queued it before it asked for another thread.
                if pause is None or "interpreter shutdown" not in str(error):
                    raise
                time.sleep(pause)

    def _write(self, key: str, data: bytes) -> None:
        filesystem, root = self._open()
        path = f"{root}/{relative_path(key)}"
        kinds = filesystem.protocol
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        # Object stores show a file when all of it is there. A folder needs the rename.
        target = f"{path}.{uuid.uuid4().hex}" if kinds & _LOCAL else path
        try:
            try:
                filesystem.pipe_file(target, data)
            except FileNotFoundError:
                if kinds & _BUCKETS:
                    raise
                filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                filesystem.pipe_file(target, data)
            if target != path:
                os.replace(target, path)
        except BaseException:
            if target != path:
                with contextlib.suppress(OSError):
                    os.unlink(target)
            raise

    def _failed(self, what: str, error: Exception) -> None:
        with self._lock:
            self._rest[what].begin()
        remedy = "Check TPU_CACHE_URL, the network and your credentials, or unset TPU_CACHE_URL."
        if isinstance(error, ImportError):
            remedy = "Install the package that it names, or unset TPU_CACHE_URL."
        self._warn(
            f"The shared cache {self.shown} cannot be {what} ({self._text(error)}); "
            "programs are kept on this machine for now.",
            remedy,
        )

    def _warn(self, what: str, remedy: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(CacheWarning(what, remedy=remedy), stacklevel=4)

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, n in counts.items():
                setattr(self.counts, name, getattr(self.counts, name) + n)


def without_credentials(text: str) -> str:
    """``text`` with what stands before the ``@`` of its URLs left out."""
    return _CREDENTIALS.sub("//...@", text)


@dataclass
class _Rest:
    """Back-off after failures of a store."""

    until: float = 0.0
    pause: float = _FIRST_PAUSE

    def now(self) -> bool:
        return time.monotonic() < self.until

    def begin(self) -> None:
        self.until = time.monotonic() + self.pause
        self.pause *= 2


def _at_exit(call: Callable[[], None]) -> None:
    """Call before concurrent.futures shuts down, which asynchronous filesystems resolve names
    with; `atexit` is too late for that.
    """
    import atexit
    import concurrent.futures.thread  # noqa: F401 (registers its own, which must come first)

    register = getattr(threading, "_register_atexit", atexit.register)
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        register(call)

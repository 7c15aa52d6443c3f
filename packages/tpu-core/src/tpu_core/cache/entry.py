"""The file format of one cache entry.

``magic (8) | version u32 | header length u32 | header (JSON) | payload``, little-endian. The header
holds the key, the size and SHA-256 of the payload, and the manifest that the caller gave. Nothing
in a file is trusted before it is checked, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"TPUCACHE"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
# A header is a page or so of JSON; a larger length is a corrupt file and must not be allocated.
_LARGEST_HEADER = 16 << 20


class CorruptEntryError(ValueError):
    """A file is not a complete entry of ours; its text says what is wrong."""


@dataclass(frozen=True)
class Entry:
    """An entry as `ExecutableStore.get` returns it.

    Attributes:
        manifest: The JSON object stored with the payload.
        payload: The serialized executable.
    """

    manifest: dict[str, Any]
    payload: bytes


@dataclass(frozen=True)
class Header:
    """Checked header of an entry: its key, the payload's size and hash, and the manifest."""

    key: str
    size: int
    sha256: str
    manifest: dict[str, Any]


def encode(key: str, payload: bytes, manifest: dict[str, Any]) -> bytes:
    """The bytes of an entry up to its payload.

    Raises:
        TypeError: The manifest is not JSON.
    """
    header = {
        "key": key,
        "size": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "manifest": manifest,
    }
    text = json.dumps(header, sort_keys=True).encode()
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def open_entry(path: Path) -> BinaryIO:
    """Open an entry for reading: a regular file of this user, not a link.

    Raises:
        FileNotFoundError: There is none.
        CorruptEntryError: The file is of another kind or another user's.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptEntryError(f"cannot be opened ({error.strerror})") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not owned(status):
        os.close(descriptor)
        raise CorruptEntryError("is not a file of this user")
    return os.fdopen(descriptor, "rb")


def owned(status: os.stat_result) -> bool:
    """Return whether a file belongs to the user of this process (always, where there are no
    users).
    """
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def read_header(file: BinaryIO, total: int) -> Header:
    """Read and check everything before the payload, and that the payload has its full size.

    Args:
        file: The entry, from its beginning.
        total: Bytes in it.

    Raises:
        CorruptEntryError: It is not an entry, or not a complete one.
    """
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise CorruptEntryError("is truncated")
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CorruptEntryError("is not a cache entry")
    if version != VERSION:
        raise CorruptEntryError(f"has format version {version}, not {VERSION}")
    if length > _LARGEST_HEADER:
        raise CorruptEntryError("has a corrupt header")
    text = file.read(length)
    if len(text) < length:
        raise CorruptEntryError("is truncated")
    try:
        header = json.loads(text)
        known = {name: header[name] for name in ("key", "size", "sha256", "manifest")}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptEntryError("has a corrupt header") from None
    kinds = {"key": str, "size": int, "sha256": str, "manifest": dict}
    if any(type(known[name]) is not kind for name, kind in kinds.items()):
        raise CorruptEntryError("has a corrupt header")
    found = total - _PREFIX.size - length
    if found != known["size"]:
        what = "is truncated" if found < known["size"] else "has data after its end"
        raise CorruptEntryError(f"{what} ({found} of {known['size']} bytes)")
    return Header(**known)


def read_entry(path: Path, key: str | None = None) -> tuple[Header, bytes]:
    """Read an entry and check its payload's hash, and its key where one is given.

    Raises:
        FileNotFoundError: There is none.
        CorruptEntryError: It is not an entry, is damaged, or belongs to another key.
    """
    with open_entry(path) as file:
        try:
            header = read_header(file, os.fstat(file.fileno()).st_size)
            payload = file.read(header.size)
        except OSError as error:
            raise CorruptEntryError(f"cannot be read ({error.strerror})") from None
    _check(header, payload, key)
    return header, payload


def decode(data: bytes, key: str) -> tuple[Header, bytes]:
    """The header and payload of an entry in memory, checked as `read_entry` checks a file.

    Raises:
        CorruptEntryError: It is not an entry, is damaged, or belongs to another key.
    """
    file = io.BytesIO(data)
    header = read_header(file, len(data))
    payload = file.read(header.size)
    _check(header, payload, key)
    return header, payload


def _check(header: Header, payload: bytes, key: str | None) -> None:
    if key is not None and header.key != key:
        raise CorruptEntryError("belongs to another key")
    if hashlib.sha256(payload).hexdigest() != header.sha256:
        raise CorruptEntryError("does not match its checksum")

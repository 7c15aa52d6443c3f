"""A hash of nested values that is the same in every process."""

from __future__ import annotations

import hashlib
import struct
from typing import Any


def fingerprint(**parts: Any) -> str:
    """SHA-256, in hex, of named parts; order of the names does not matter, types do.

    Args:
        **parts: ``None``, bools, ints, floats, strings, bytes, and lists, tuples, sets and dicts of
            them. Lists and tuples are the same.

    Raises:
        TypeError: A part is of another type. Its ``repr`` may hold an address, which would make the
            key different in every process.

    Example:
        >>> fingerprint(module=bytecode, jaxlib="0.10.2", options=[("opt_level", 3)])
    """
    digest = hashlib.sha256()
    _feed(digest, parts)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    # Every value is a type tag, a length and bytes, so that no two values share an encoding.
    if isinstance(value, dict):
        items = sorted((_digest(k), v) for k, v in value.items())
        _tag(digest, b"d", len(items))
        for key, item in items:
            digest.update(key)
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        _tag(digest, b"l", len(value))
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (set, frozenset)):
        _tag(digest, b"e", len(value))
        for item in sorted(_digest(item) for item in value):
            digest.update(item)
    else:
        tag, data = _scalar(value)
        _tag(digest, tag, len(data))
        digest.update(data)


def _tag(digest: Any, tag: bytes, length: int) -> None:
    digest.update(tag + struct.pack("<Q", length))


def _digest(value: Any) -> bytes:
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.digest()


def _scalar(value: Any) -> tuple[bytes, bytes]:
    if value is None:
        return b"n", b""
    # Exact types: a subclass (an enum, numpy's float64) may mean or print something else.
    if type(value) is bool:
        return b"b", bytes([value])
    if type(value) is int:
        return b"i", str(value).encode()
    if type(value) is float:
        return b"f", struct.pack("<d", value)
    if type(value) is str:
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"y", bytes(value)
    raise TypeError(
        f"fingerprint: {type(value).__module__}.{type(value).__qualname__} has no stable encoding; "
        "pass its name, numbers or bytes."
    )

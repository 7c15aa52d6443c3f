"""Digest of the extension's sources; `setup.py` loads this file by itself, before the package."""

from __future__ import annotations

import hashlib
from pathlib import Path

CSRC = Path(__file__).with_name("csrc")


def digest() -> str:
    """SHA-256 of the C++ sources, in hex."""
    sources = hashlib.sha256()
    for path in sorted(CSRC.glob("*.*")):
        sources.update(path.read_bytes())
    return sources.hexdigest()

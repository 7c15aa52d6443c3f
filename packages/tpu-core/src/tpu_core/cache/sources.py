"""Digests of sources, for the keys of the executable cache.

A program may be used again only while the code that made it is the same. A digest covers a whole
package: each Python file and each table (``.json``) below its folder, with its path in it. Nothing
is left out by name, so that a file that is edited, added, renamed or moved to another folder makes
another key. The price is that an edit of a command compiles programs again, too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

PATTERNS = ("*.py", "*.json")


def folder_digest(folder: Path) -> str:
    """SHA-256, in hex, of the sources below a folder: paths relative to it, and contents.

    Args:
        folder: Folder of a package. Compiled files and empty folders do not count.

    Example:
        >>> before = folder_digest(copy)
        >>> (copy / "rules.py").rename(copy / "shapes" / "rules.py")
        >>> folder_digest(copy) == before
        False
    """
    found = hashlib.sha256()
    files = {f.relative_to(folder).as_posix(): f for p in PATTERNS for f in folder.rglob(p)}
    for name in sorted(files):
        content = files[name].read_bytes()
        found.update(f"{len(name)}:{name}{len(content)}:".encode() + content)
    return found.hexdigest()


@functools.cache
def package_digest(name: str) -> str:
    """`folder_digest` of an installed top-level package, read once in a process.

    Args:
        name: The package; it is not imported.

    Raises:
        ModuleNotFoundError: No package of that name is installed.

    Example:
        >>> package_digest("tpu_core") in source_versions()
        True
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"There is no package '{name}'.", name=name)
    return " ".join(_cached_folder(folder) for folder in spec.submodule_search_locations)


def digest_around(file: Path) -> str:
    """Digest of the package that a file is in; of the file alone where it is in none.

    Args:
        file: A Python file. Its package is the outermost folder above it that has, as all between
            them, an ``__init__.py``.

    Raises:
        OSError: There is no such file, as for code that was typed in.
    """
    content = file.read_bytes()
    package = None
    for folder in file.parents:
        if not (folder / "__init__.py").exists():
            break
        package = folder
    if package is None:
        return hashlib.sha256(content).hexdigest()
    return _cached_folder(str(package))


@functools.cache
def _cached_folder(folder: str) -> str:
    return folder_digest(Path(folder))

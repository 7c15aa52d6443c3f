"""The C++ extension: a build for each minor release of torch, and the one for the torch there is.

A build is the file ``_extensions/torch_2_13/_C.<tag of the Python>.so``. PyTorch promises no
binary interface between minor releases, so none is loaded into another one. ``setup.py`` loads this
file by itself, before the package. ``TPU_CORE_SANITIZE=address`` makes and loads builds for that
sanitizer, ``_extensions/torch_2_13_address`` (``nox -s sanitize``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

CSRC = Path(__file__).with_name("csrc")
FOLDER = Path(__file__).with_name("_extensions")
SANITIZER = os.environ.get("TPU_CORE_SANITIZE", "")
_SUFFIX = f"_{SANITIZER}" if SANITIZER else ""
FILE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def minor(torch_version: str) -> str:
    """The minor release of a version: 2.13 of 2.13.0+cpu."""
    return ".".join(re.findall(r"\d+", torch_version)[:2])


def build_of(torch_minor: str) -> Path:
    """Path of the build for a minor release of torch and this Python."""
    return FOLDER / f"torch_{torch_minor.replace('.', '_')}{_SUFFIX}" / FILE


def builds() -> dict[str, Path]:
    """The builds for this Python, by the minor release of torch, the lowest first."""
    found = []
    for path in FOLDER.glob(f"torch_*/{FILE}"):
        if match := re.fullmatch(rf"torch_(\d+)_(\d+){_SUFFIX}", path.parent.name):
            found.append(([int(n) for n in match.groups()], path))
    return {".".join(map(str, numbers)): path for numbers, path in sorted(found)}


def sources_digest() -> str:
    """SHA-256 of the C++ sources, in hex."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.rglob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(build: Path) -> bool:
    """Return whether a build is of the sources beside it, if there are any; it holds their
    digest.
    """
    return not CSRC.exists() or sources_digest().encode() in build.read_bytes()


def load(name: str) -> ModuleType:
    """Load the build for the torch that is installed as the module ``name``.

    Raises:
        ImportError: There is none, or it cannot be loaded.
    """
    import torch

    path = build_of(minor(torch.__version__))
    if not path.exists():
        raise ImportError(f"there is no {path.relative_to(FOLDER.parent)}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # of an existing file with this suffix
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

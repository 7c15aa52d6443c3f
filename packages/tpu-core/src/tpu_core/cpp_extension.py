"""C++ extensions of packages on the device: builds by release of torch, and the one that fits.

A build is the file ``_extensions/torch_2_13/_C.<tag of the Python>.so`` in its package. PyTorch
promises no binary interface between minor releases, so none is loaded into another one.
`tpu_core.cpp_build` makes the builds, and loads this file by itself. ``TPU_CORE_SANITIZE=address``
makes and loads those for that sanitizer, ``_extensions/torch_2_13_address`` (``nox -s sanitize``).
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

HEADERS = Path(__file__).with_name("include")
"""Folder of the C++ headers that extensions of other packages may include."""
SANITIZER = os.environ.get("TPU_CORE_SANITIZE", "")
_SUFFIX = f"_{SANITIZER}" if SANITIZER else ""
_FILE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def minor(torch_version: str) -> str:
    """The minor release of a version: 2.13 of 2.13.0+cpu."""
    return ".".join(re.findall(r"\d+", torch_version)[:2])


class Extension:
    """The extension ``_C`` of a package: its sources, its builds and the module.

    Args:
        package: Name of the package.
        folder: Folder of the package.

    Attributes:
        csrc: Folder of the C++ sources, which an installed wheel lacks.
        folder: Folder of the builds.

    Example:
        >>> Extension("mylib", Path(__file__).parent).load()  # mylib/_C.py
    """

    def __init__(self, package: str, folder: Path) -> None:
        self.package = package
        self.csrc = folder / "csrc"
        self.folder = folder / "_extensions"

    def build_of(self, torch_minor: str) -> Path:
        """Path of the build for a minor release of torch and this Python."""
        return self.folder / f"torch_{torch_minor.replace('.', '_')}{_SUFFIX}" / _FILE

    def builds(self) -> dict[str, Path]:
        """The builds for this Python, by the minor release of torch, the lowest first."""
        found = []
        for path in self.folder.glob(f"torch_*/{_FILE}"):
            if match := re.fullmatch(rf"torch_(\d+)_(\d+){_SUFFIX}", path.parent.name):
                found.append(([int(n) for n in match.groups()], path))
        return {".".join(map(str, numbers)): path for numbers, path in sorted(found)}

    def sources_digest(self) -> str:
        """SHA-256 of the C++ sources and of tpu-core's headers, in hex."""
        digest = hashlib.sha256()
        for path in (*sorted(self.csrc.rglob("*.*")), *sorted(HEADERS.rglob("*.h"))):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def is_current(self, build: Path) -> bool:
        """Return whether a build is of the sources beside it, if there are any; it holds their
        digest.
        """
        return not self.csrc.exists() or self.sources_digest().encode() in build.read_bytes()

    def problem(self) -> tuple[str, str] | None:
        """Problem and remedy if the builds do not fit the installed torch or the sources."""
        import torch

        builds, wanted = self.builds(), minor(torch.__version__)
        if builds and wanted not in builds:
            known = ", ".join(builds)
            return (
                f"{self.package} was built for torch {known}, "
                f"but torch {torch.__version__} is installed.",
                f'Install a torch that it was built for (pip install "torch=={list(builds)[-1]}.*")'
                f", or rebuild {self._project} for the installed one ({self._rebuild}).",
            )
        if builds and not self.is_current(builds[wanted]):
            return (
                f"The extension of {self.package} was built from other sources than those beside "
                "it.",
                "Rebuild it: run a nox session of the repository, or in the folder of "
                f"{self._project} pip install --no-build-isolation --editable .",
            )
        return None

    def load_problem(self, error: ImportError) -> tuple[str, str]:
        """Problem and remedy where `load_build` failed."""
        import torch

        return (
            f"The extension of {self.package} cannot be loaded into torch {torch.__version__}: "
            f"{error}",
            f"Reinstall {self._project} for this torch ({self._rebuild}).",
        )

    def load(self) -> ModuleType:
        """Load the build for the installed torch as the module ``_C`` of the package.

        Raises:
            VersionMismatchError: There is none, it is of other sources, or it cannot be loaded.
            DeviceSlotTakenError: Another package has registered a device.
        """
        from tpu_core.errors import TpuError, VersionMismatchError

        problem = self.problem()
        if problem is None:
            try:
                return self.load_build()
            except ImportError as error:
                if isinstance(error.__cause__, TpuError):  # of tpu-core's own extension
                    raise error.__cause__ from None
                problem = self.load_problem(error)
        what, remedy = problem
        raise VersionMismatchError(what, remedy=remedy)

    def load_build(self) -> ModuleType:
        """Load the build for the installed torch without a look at the sources.

        Raises:
            ImportError: There is none, or it cannot be loaded.
        """
        import torch

        name, path = f"{self.package}._C", self.build_of(minor(torch.__version__))
        if not path.exists():
            raise ImportError(f"there is no {path.relative_to(self.folder.parent)}")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # of an existing file with this suffix
        module = importlib.util.module_from_spec(spec)
        replaced = sys.modules.get(name)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            if replaced is None:
                del sys.modules[name]
            else:
                sys.modules[name] = replaced
            raise
        return module

    @property
    def _project(self) -> str:
        return self.package.replace("_", "-")

    @property
    def _rebuild(self) -> str:
        return f"pip install --force-reinstall --no-deps --no-build-isolation {self._project}"


CORE = Extension("tpu_core", Path(__file__).parent)
"""The extension of tpu-core itself."""

"""Build of a package's C++ extension against the installed torch, for ``setup.py``.

``setup.py`` loads this file by itself, without the package around it, as an import of ``tpu_core``
would load the extension that is to be built:

    (folder,) = importlib.util.find_spec("tpu_core").submodule_search_locations
    runpy.run_path(f"{folder}/cpp_build.py")["setup"](Path(__file__).parent, "mylib")

Three variables of the environment change what is built. ``TPU_CORE_BUILDS=2.13,2.14`` compiles
nothing: the wheel takes the builds for these minor releases of torch that lie in the source tree,
where ``nox -s build`` has made them one after the other. ``TPU_CORE_SEPARATE=1`` compiles each
source by itself, ``TPU_CORE_SANITIZE=address`` for a sanitizer.
"""

from __future__ import annotations

import os
import runpy
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# An installed earlier build of the package must not be loaded into its own build.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"Building a C++ extension needs PyTorch, and `import torch` failed:\n  {error}\n"
        "Install it first (pip install torch), then run pip install --no-build-isolation with "
        "setuptools and ninja installed."
    )

import setuptools
from packaging.requirements import Requirement

LOADING = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cpp_extension.py"))))
MINOR = LOADING.minor(torch.__version__)
SEPARATE = os.environ.get("TPU_CORE_SEPARATE") == "1"
BUILDS = [part for part in os.environ.get("TPU_CORE_BUILDS", "").split(",") if part]
# Locks check themselves as well (csrc/runtime/locks.h of tpu-core). Without `vptr`, which
# "undefined" has and which asks for type information that torch keeps to itself.
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize=vptr", "-DTPU_CHECK_LOCKS")


def setup(
    project: Path,
    package: str,
    units: Sequence[Sequence[str]] = (),
    include_dirs: Sequence[Path] = (),
) -> None:
    """Call `setuptools.setup` for a package in ``src/`` with C++ sources in its folder ``csrc``.

    A header ``csrc/precompiled.h``, if there is one, is compiled once and begins each source.

    Args:
        project: Folder of ``pyproject.toml``.
        package: Name of the package.
        units: Folders of ``csrc`` whose sources form a translation unit each; without any, each
            source is one.
        include_dirs: Folders of headers beside those of torch, tpu-core and the package.
    """
    sources = _Sources(project, package, units)
    _require_supported_torch(project)

    class Distribution(setuptools.Distribution):
        """A distribution for one Python and one platform, also where its extensions are files."""

        def has_ext_modules(self) -> bool:
            return True

        def parse_config_files(self, *args: Any, **options: Any) -> None:
            super().parse_config_files(*args, **options)
            # pyproject.toml, which is read here, replaces what setup() is given.
            self.package_data.setdefault(package, []).extend(sources.finished(BUILDS))

    class Build(_BuildExtension):
        files = sources

    # Of a checkout from before there were several builds; Python would take it for the module `_C`.
    for stale in sources.folder.glob("_C.*.so"):
        stale.unlink()
    sources.extension.build_of(MINOR).parent.mkdir(parents=True, exist_ok=True)
    kind = f"-{LOADING.SANITIZER}" if LOADING.SANITIZER else ""
    objects = Path("build") / f"objects-{sys.version_info.minor}-{MINOR}{kind}"
    setuptools.setup(
        distclass=Distribution,
        ext_modules=[] if BUILDS else [_cpp_extension(sources, include_dirs)],
        cmdclass={"build_ext": Build},
        # One place for object files, so that the next build compiles only what has changed.
        options={"build_ext": {"build_temp": str(objects)}},
    )


class _Sources:
    """The C++ sources of a package, and those that are generated from them in ``build/units``."""

    def __init__(self, project: Path, package: str, units: Sequence[Sequence[str]]) -> None:
        self.project = project.resolve()
        self.folder = self.project / "src" / package
        self.extension = LOADING.Extension(package, self.folder)
        self.csrc: Path = self.extension.csrc
        self._units = units

    def translation_units(self) -> list[str]:
        """Sources to compile: a file for each unit, which includes those of its folders.

        pybind11 and PyTorch cost every translation unit 5 s beyond their precompiled header, mostly
        code that the linker drops again: on two cores the 40 sources of tpu-core take three times
        as long as four units. Both ways must work, so `tests/test_csrc.py` there looks for names
        that sources of a unit share.
        """
        if SEPARATE or not self._units:
            return [self._path(source) for source in sorted(self.csrc.rglob("*.cpp"))]
        found = []
        for folders in self._units:
            sources = [path for f in folders for path in sorted((self.csrc / f).glob("*.cpp"))]
            text = "".join(f'#include "{path.relative_to(self.csrc)}"\n' for path in sources)
            found.append(self._generate(f"{folders[0]}.cpp", text))
        return found

    def digest_source(self) -> str:
        """The file with what the build says of itself; alone, as it changes with all others."""
        digest = self.extension.sources_digest()
        name = "const char* const kSources"
        text = f'[[gnu::used]] extern {name};\n{name} = "{digest}";\n'
        return self._generate("digest.cpp", text)

    def finished(self, minors: list[str]) -> list[str]:
        """Builds for minor releases of torch, of the same sources and for this Python."""
        extension = self.extension
        found = extension.builds()
        missing = [m for m in minors if m not in found or not extension.is_current(found[m])]
        if missing:
            torches = ", ".join(missing)
            sys.exit(f"{self.project.name}: no build of these sources for torch {torches}.")
        return [str(found[minor].relative_to(self.folder)) for minor in minors]

    def depends(self) -> list[str]:
        """All that a build is made of."""
        headers = sorted(map(str, LOADING.HEADERS.rglob("*.h")))
        return [*sorted(map(self._path, self.csrc.rglob("*.*"))), *headers]

    def _path(self, path: Path) -> str:
        return str(path.relative_to(self.project))

    def _generate(self, name: str, text: str) -> str:
        """Write a generated source unless it is the same; its path."""
        path = self.project / "build" / "units" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return self._path(path)


class _BuildExtension(BuildExtension):
    """`BuildExtension` with a precompiled header, which each translation unit begins with."""

    files: _Sources

    def build_extension(self, ext: Any) -> None:
        precompiled = self.files.csrc / "precompiled.h"
        digest = self.files.digest_source()
        if not precompiled.exists():
            ext.sources.append(digest)
            super().build_extension(ext)
            return
        compile_sources = self.compiler.compile

        def compile_with_header(sources: list[str], **options: Any) -> list[str]:
            # The compiler takes a precompiled header only where all options are the same.
            first = [str(precompiled.relative_to(self.files.project)), digest]
            built, digest_object = compile_sources(first, **options)
            header = Path(built).with_name(precompiled.name).resolve()
            # It is found beside a header of its name, which serves where it does not fit.
            header.write_text(f'#include "{precompiled}"\n')
            linked = header.with_name(f"{header.name}.gch")
            linked.unlink(missing_ok=True)
            os.link(built, linked)
            flags = [*options.pop("extra_postargs"), "-include", str(header)]
            return [*compile_sources(sources, **options, extra_postargs=flags), digest_object]

        self.compiler.src_extensions.append(".h")
        self.compiler.compile = compile_with_header
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_sources


def _cpp_extension(sources: _Sources, include_dirs: Sequence[Path]) -> Any:
    sanitizer = [f"-fsanitize={LOADING.SANITIZER}"] if LOADING.SANITIZER else []
    speed = [*sanitizer, *SANITIZED] if sanitizer else ["-O2", "-g0"]
    extension = sources.extension
    return CppExtension(
        f"{extension.package}._extensions.{extension.build_of(MINOR).parent.name}._C",
        sources.translation_units(),
        include_dirs=list(map(str, (sources.csrc, LOADING.HEADERS, *include_dirs))),
        depends=sources.depends(),
        extra_compile_args=[*speed, "-std=c++20", "-fvisibility=hidden", "-Winvalid-pch"],
        extra_link_args=sanitizer,
    )


def _require_supported_torch(project: Path) -> None:
    """Refuse a torch that ``pyproject.toml`` does not allow.

    Raises:
        SystemExit: The installed one.
    """
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name = metadata["name"]
    for requirement in map(Requirement, metadata.get("dependencies", ())):
        # By the minor release alone: vendors' builds of 2.15 may call themselves 2.15.0a0.
        if requirement.name == "torch" and MINOR not in requirement.specifier:
            sys.exit(
                f"{name}: found torch {torch.__version__}, and this version of {name} builds "
                f"against torch {requirement.specifier}. Install one of them: "
                f"pip install '{requirement}'"
            )

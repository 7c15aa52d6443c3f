"""Build of the C++ extension ``tpu_core._C`` against the torch that is installed.

``TPU_CORE_BUILDS=2.13,2.14`` compiles nothing: the wheel takes the builds for these minor releases
of torch that lie in the source tree, where ``nox -s build`` has made them one after the other.
"""

from __future__ import annotations

import os
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.requirements import Requirement
from setuptools import Distribution, setup

HERE = Path(__file__).resolve().parent
PACKAGE = Path("src") / "tpu_core"
CSRC = HERE / PACKAGE / "csrc"
HEADER = CSRC / "precompiled.h"
# Layers of the sources, the lowest first: those in parentheses are one translation unit.
UNITS = (
    ("runtime", "values"),
    ("recorder",),
    ("execution",),
    ("custom_ops", "collectives", "bindings"),
)
SEPARATE = os.environ.get("TPU_CORE_SEPARATE") == "1"
BUILDS = [part for part in os.environ.get("TPU_CORE_BUILDS", "").split(",") if part]

# An installed earlier build of this very package must not be loaded into its own build.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        "tpu-core: building the extension tpu_core._C needs PyTorch, and `import torch` failed:\n"
        f"  {error}\n"
        "Install it first (pip install torch), then run pip install --no-build-isolation with "
        "setuptools and ninja installed."
    )

EXTENSION = SimpleNamespace(**runpy.run_path(str(HERE / PACKAGE / "_extension.py")))
MINOR = EXTENSION.minor(torch.__version__)
# By the minor release alone: vendors' builds of 2.15 may call themselves 2.15.0a0.
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
(TORCH,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
if MINOR not in TORCH.specifier:
    sys.exit(
        f"tpu-core: found torch {torch.__version__}, and this version of tpu-core builds against "
        f"torch {TORCH.specifier}. Install one of them: pip install '{TORCH}'"
    )


def write_if_changed(path: Path, text: str) -> str:
    """Write a generated source unless it is the same; its path from here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path.relative_to(HERE))


def translation_units() -> list[str]:
    """Sources to compile: a file for each of `UNITS`, which includes those of its layers.

    With ``TPU_CORE_SEPARATE=1`` each source is compiled by itself. pybind11 and PyTorch cost every
    translation unit 5 s beyond their precompiled header, mostly code that the linker drops again:
    on two cores 40 units take three times as long as these four. Both ways must work, so
    `tests/test_csrc.py` looks for names that sources of a unit share.
    """
    if SEPARATE:
        found = [str(path.relative_to(HERE)) for path in sorted(CSRC.rglob("*.cpp"))]
    else:
        found = []
        for layers in UNITS:
            sources = [path for layer in layers for path in sorted((CSRC / layer).glob("*.cpp"))]
            text = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in sources)
            found.append(write_if_changed(HERE / "build" / "units" / f"{layers[0]}.cpp", text))
    return found


def digest_source() -> str:
    """The file with what the build says of itself; alone, as it changes with each of the others."""
    digest = EXTENSION.sources_digest()
    text = f'extern const char* const kSources;\nconst char* const kSources = "{digest}";\n'
    return write_if_changed(HERE / "build" / "units" / "digest.cpp", text)


class BuildExtensions(BuildExtension):
    """`BuildExtension` with a precompiled header, which each translation unit begins with."""

    def build_extension(self, ext: Any) -> None:
        compile_sources = self.compiler.compile

        def compile_with_header(sources: list[str], **options: Any) -> list[str]:
            # The compiler takes a precompiled header only where all options are the same.
            first = [str(HEADER.relative_to(HERE)), digest_source()]
            built, digest = compile_sources(first, **options)
            header = Path(built).with_name(HEADER.name).resolve()
            # It is found beside a header of its name, which serves where it does not fit.
            header.write_text(f'#include "{HEADER}"\n')
            precompiled = header.with_name(f"{HEADER.name}.gch")
            precompiled.unlink(missing_ok=True)
            os.link(built, precompiled)
            flags = [*options.pop("extra_postargs"), "-include", str(header)]
            return [*compile_sources(sources, **options, extra_postargs=flags), digest]

        self.compiler.src_extensions.append(".h")
        self.compiler.compile = compile_with_header
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_sources


class BinaryDistribution(Distribution):
    """A distribution for one Python and one platform, also where its extensions are files."""

    def has_ext_modules(self) -> bool:
        return True

    def parse_config_files(self, *args: Any, **options: Any) -> None:
        super().parse_config_files(*args, **options)
        # pyproject.toml, which is read here, replaces what setup() is given.
        self.package_data.setdefault("tpu_core", []).extend(finished(BUILDS))


def finished(minors: list[str]) -> list[str]:
    """Builds for minor releases of torch, of the same sources and for this Python."""
    found = EXTENSION.builds()
    missing = [m for m in minors if m not in found or not EXTENSION.is_current(found[m])]
    if missing:
        sys.exit(f"tpu-core: there is no build of these sources for torch {', '.join(missing)}.")
    return [str(found[minor].relative_to(HERE / PACKAGE)) for minor in minors]


# Locks check themselves as well (csrc/runtime/locks.h). Without `vptr`, which "undefined" has and
# which asks for type information that torch keeps to itself.
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize=vptr", "-DTPU_CHECK_LOCKS"]


def extension() -> CppExtension:
    sanitizer = [f"-fsanitize={EXTENSION.SANITIZER}"] if EXTENSION.SANITIZER else []
    speed = [*sanitizer, *SANITIZED] if sanitizer else ["-O2", "-g0"]
    kineto = Path(torch.__file__).parent / "include" / "kineto"  # of the profiler
    return CppExtension(
        f"tpu_core._extensions.{EXTENSION.build_of(MINOR).parent.name}._C",
        translation_units(),
        include_dirs=[str(CSRC), str(kineto)],
        depends=sorted(str(p.relative_to(HERE)) for p in CSRC.rglob("*.*")),
        extra_compile_args=[*speed, "-std=c++20", "-fvisibility=hidden", "-Winvalid-pch"],
        extra_link_args=sanitizer,
    )


# Of a checkout from before there were several builds; Python would take it for the module `_C`.
for stale in (HERE / PACKAGE).glob("_C.*.so"):
    stale.unlink()
EXTENSION.build_of(MINOR).parent.mkdir(parents=True, exist_ok=True)
kind = f"-{EXTENSION.SANITIZER}" if EXTENSION.SANITIZER else ""
OBJECTS = Path("build") / f"objects-{sys.version_info.minor}-{MINOR}{kind}"
setup(
    distclass=BinaryDistribution,
    ext_modules=[] if BUILDS else [extension()],
    cmdclass={"build_ext": BuildExtensions},
    # One place for object files, so that the next build compiles only what has changed.
    options={"build_ext": {"build_temp": str(OBJECTS)}},
)

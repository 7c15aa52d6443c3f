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
BUILDS = [part for part in os.environ.get("TPU_CORE_BUILDS", "").split(",") if part]
UNITS = 2  # compilers at once; more of them need more than 3 GB of memory

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


def translation_units() -> list[str]:
    """Write the files that are compiled, each of which includes every other source.

    A source takes 20 s to compile, nearly all of it PyTorch's headers: read twice instead of once
    for each source, they leave a build of 50 s on two cores, where it was two and a half minutes.
    """
    folder = HERE / "build" / "units"
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted((HERE / PACKAGE / "csrc").glob("*.cpp"))
    # Python's internal headers must come before Python.h.
    sources.sort(key=lambda p: p.name != "lines.cpp")
    units = []
    digest = EXTENSION.sources_digest()
    for i in range(UNITS):
        text = "".join(f'#include "{p}"\n' for p in sources[i::UNITS])
        path = folder / f"unit{i}.cpp"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        units.append(str(path.relative_to(HERE)))
    # What the build says of itself; alone, as it changes with each of the others.
    path = folder / "digest.cpp"
    text = f'extern const char* const kSources;\nconst char* const kSources = "{digest}";\n'
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return [*units, str(path.relative_to(HERE))]


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


def extension() -> CppExtension:
    parts = (HERE / PACKAGE / "csrc").glob("*.*")
    return CppExtension(
        f"tpu_core._extensions.{EXTENSION.build_of(MINOR).parent.name}._C",
        translation_units(),
        include_dirs=[str(Path(torch.__file__).parent / "include" / "kineto")],  # of the profiler
        depends=sorted(str(p.relative_to(HERE)) for p in parts),
        extra_compile_args=["-O2", "-g0", "-std=c++20", "-fvisibility=hidden"],
    )


# Of a checkout from before there were several builds; Python would take it for the module `_C`.
for stale in (HERE / PACKAGE).glob("_C.*.so"):
    stale.unlink()
EXTENSION.build_of(MINOR).parent.mkdir(parents=True, exist_ok=True)
setup(
    distclass=BinaryDistribution,
    ext_modules=[] if BUILDS else [extension()],
    cmdclass={"build_ext": BuildExtension},
    # One place for object files, so that the next build compiles only what has changed.
    options={"build_ext": {"build_temp": f"build/objects-{sys.version_info.minor}-{MINOR}"}},
)

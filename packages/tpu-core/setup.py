"""Build of the C++ extension ``tpu_core._C`` against the torch that is installed."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
PACKAGE = Path("src") / "tpu_core"
MINIMUM_TORCH = "2.13"
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
        f"Install it first (pip install 'torch=={MINIMUM_TORCH}.0'), then run pip install "
        "--no-build-isolation with setuptools and ninja installed."
    )

if not torch.__version__.startswith(f"{MINIMUM_TORCH}."):
    sys.exit(
        f"tpu-core: found torch {torch.__version__}, and this version of tpu-core builds against "
        f"torch {MINIMUM_TORCH}. Install it with: pip install 'torch=={MINIMUM_TORCH}.0'"
    )


def write_build_info() -> None:
    """Record what the extension is built against, compared with the running torch at first use, and
    from, which is part of every key in the cache folder.
    """
    sources = runpy.run_path(str(HERE / PACKAGE / "_sources.py"))["digest"]()
    text = (
        '"""Written by setup.py: what the extension was built against and from."""\n\n'
        f"TORCH_VERSION = {torch.__version__!r}\n"
        f"SOURCES = {sources!r}\n"
    )
    path = HERE / PACKAGE / "_build_info.py"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


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
    for i in range(UNITS):
        text = "".join(f'#include "{p}"\n' for p in sources[i::UNITS])
        path = folder / f"unit{i}.cpp"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        units.append(str(path.relative_to(HERE)))
    return units


def extension() -> CppExtension:
    parts = (HERE / PACKAGE / "csrc").glob("*.*")
    return CppExtension(
        "tpu_core._C",
        translation_units(),
        depends=sorted(str(p.relative_to(HERE)) for p in parts),
        extra_compile_args=["-O2", "-g0", "-std=c++20", "-fvisibility=hidden"],
    )


write_build_info()
setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
    # One place for object files, so that a wheel uses those of the editable install.
    options={"build_ext": {"build_temp": "build/objects"}},
)

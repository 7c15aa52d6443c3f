"""Check the C++ sources with clang-tidy: ``python tools/cpp_tidy.py``, after a build.

The checks are in ``.clang-tidy``. The translation units are those of the build, so that a source is
read with what its layer includes. On two cores it takes 50 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# An extension that is not built yet must not be loaded.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "packages" / "tpu-core"
DISTRIBUTED = ROOT / "packages" / "tpu-distributed" / "src" / "tpu_distributed" / "csrc"
OWN = (CORE / "src" / "tpu_core" / "csrc", CORE / "src" / "tpu_core" / "include", DISTRIBUTED)


def sources() -> list[Path]:
    """Translation units: those that a build of tpu-core has written, and tpu-distributed's."""
    units = [p for p in sorted((CORE / "build" / "units").glob("*.cpp")) if p.stem != "digest"]
    if not units:
        sys.exit("cpp_tidy: there are no translation units; build tpu-core first (any nox session)")
    return [*units, *sorted(DISTRIBUTED.glob("*.cpp"))]


def flags() -> list[str]:
    """Options of the compiler that matter to what a source means."""
    torch = [Path(p) for p in cpp_extension.include_paths()]
    system = [*torch, torch[0] / "kineto", Path(sysconfig.get_path("include"))]
    own = [f"-I{folder}" for folder in OWN]
    names = ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    return ["-std=c++20", *own, *(f"-isystem{folder}" for folder in system), *names]


def complaints(source: Path) -> str:
    """What clang-tidy says of a translation unit; empty where it says nothing."""
    command = [str(Path(sys.executable).with_name("clang-tidy")), "--quiet", str(source), "--"]
    done = subprocess.run([*command, *flags()], cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout or done.stderr


def main() -> int:
    """Exit status: 0 where nothing is found."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [text for text in pool.map(complaints, sources()) if text]
    print(*found, sep="\n", end="")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

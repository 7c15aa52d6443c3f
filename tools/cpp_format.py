"""Format the C++ sources by ``.clang-format``; ``--check`` only says which are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    kinds = ("csrc/**/*.cpp", "csrc/**/*.h", "include/**/*.h")
    files = [p for kind in kinds for p in ROOT.glob(f"packages/*/src/*/{kind}")]
    tool = Path(sys.executable).with_name("clang-format")
    mode = ("--dry-run", "-Werror") if "--check" in sys.argv else ("-i",)
    return subprocess.run([tool, *mode, *sorted(files)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

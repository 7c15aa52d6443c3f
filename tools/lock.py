"""Lock files in ``locks/``: every distribution, its version and its hashes.

``development.txt`` is what the nox sessions install for tests, ``runtime.txt`` what tpu-core needs;
the other packages need tpu-core alone. ``uv pip sync locks/development.txt`` makes that very
environment. They are for Linux on x86-64 and the versions that continuous integration runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("build", "examples", "test", "lint", "docs", "release")


def lock(name: str, constraints: str, *sources: str) -> None:
    """Write a lock file; versions that it has already stay, as far as they fit."""
    command = [
        *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "--native-tls"),
        *(
            "--no-config",
            "--quiet",
            "--generate-hashes",
            "--python-platform",
            "x86_64-manylinux_2_31",
        ),
        *("--python-version", ".".join(map(str, sys.version_info[:2]))),
        *("--custom-compile-command", "nox -s lock", "--constraints", "-", "-o", f"locks/{name}"),
        *("packages/tpu-core/pyproject.toml", *sources),
    ]
    subprocess.run(command, cwd=ROOT, input=constraints, text=True, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the lock files.")
    parser.add_argument("pins", nargs="+", help="as in torch==2.13.0 jax==0.10.2")
    constraints = "\n".join(parser.parse_args().pins)
    (ROOT / "locks").mkdir(exist_ok=True)
    lock("runtime.txt", constraints)
    groups = [part for group in GROUPS for part in ("--group", f"pyproject.toml:{group}")]
    lock("development.txt", constraints, *groups)


if __name__ == "__main__":
    main()

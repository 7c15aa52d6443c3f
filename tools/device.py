"""Tests, example and the `models` benchmark on the accelerator of this machine.

``nox -s device`` runs it. Where there is neither nox nor a network, ``python tools/device.py
--build`` does so with the torch and JAX that are installed, and builds the packages for them first.
The platform is CUDA unless ``TPU_PLATFORM`` names another; JAX needs its plug-in for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tpu-core", "tpu-eager", "tpu-compile", "tpu-kernels", "tpu-distributed")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def run(*args: str | Path) -> bool:
    """Run this Python; whether it ended well."""
    print(f"== {' '.join(map(str, args))}", flush=True)
    env = {"TPU_PLATFORM": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    return subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, env=env).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and benchmark on an accelerator.")
    parser.add_argument("--build", action="store_true", help="install the packages first")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="where results go")
    options = parser.parse_args()
    results = options.out.resolve()
    if options.build:
        for package in PACKAGES:
            if not run("-m", "pip", "install", *OFFLINE, "--editable", f"packages/{package}"):
                return 1
    # One process at a time: an accelerator has one owner.
    steps = {
        "doctor": ("-m", "tpu_core", "doctor"),
        "example": ("examples/train_char_gpt.py", "--steps", "20", "--out", results),
    }
    for package in ("tpu-core", "tpu-eager"):
        tests = ("-m", "pytest", "-p", "no:xdist", "-m", "not slow", f"packages/{package}/tests")
        steps[f"tests of {package}"] = (*tests, f"--junit-xml={results / package}.xml")
    steps["benchmark"] = ("integration/benchmarks/models.py",)
    ended = {name: run(*step) for name, step in steps.items()}
    for name, well in ended.items():
        print(f"{name}: {'ended well' if well else 'FAILED'}")
    return 0 if all(ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Tests, example and the `models` benchmark on the accelerator of this machine.

``nox -s device`` runs it. Where there is neither nox nor a network, ``python tools/device.py
--build`` does so with the torch and JAX that are installed, and builds the packages for them first.
The platform is CUDA unless ``TPU_PLATFORM`` names another; JAX needs its plug-in for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tpu-core", "tpu-eager", "tpu-compile", "tpu-kernels", "tpu-distributed")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")
WORKLOADS, RUNNERS = "mlp,small_ops,gpt,resnet18", "torch,inductor,fused,compiled"


def run(platform: str, *args: str | Path, seconds: float | None = None) -> bool:
    """Run this Python for at most some seconds; whether it ended well."""
    print(f"== {' '.join(map(str, args))}", flush=True)
    # Memory as it is needed: several processes share the accelerator.
    env = {**os.environ, "TPU_PLATFORM": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen([sys.executable, *map(str, args)], cwd=ROOT, env=env)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then reports what it has
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and benchmark on an accelerator.")
    parser.add_argument("--build", action="store_true", help="install the packages first")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="where results go")
    parser.add_argument("--workers", default="1", help="processes that run tests; one for a TPU")
    parser.add_argument("--shard", default="1/1", help="part of the tests, such as 2/8")
    parser.add_argument("--steps", help="of doctor, example, models, tests; all by default")
    parser.add_argument("--seconds", type=float, help="after which a step is stopped")
    options = parser.parse_args()
    results, platform = options.out.resolve(), os.environ.get("TPU_PLATFORM", "cuda")
    results.mkdir(parents=True, exist_ok=True)
    if options.build:
        for package in PACKAGES:
            if not run(platform, "-m", "pip", "install", *OFFLINE, "-e", f"packages/{package}"):
                return 1
    models: tuple[str, ...] = ("integration/benchmarks/models.py", "--quick", "--steps", "50")
    models += ("--platform", platform)
    models += ("--only", WORKLOADS, "--runners", RUNNERS, "--json", str(results / "models.jsonl"))
    tests = (
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-n",
        options.workers,
        "--shard",
        options.shard,
    )
    steps: dict[str, tuple[str | Path, ...]] = {
        "doctor": ("-m", "tpu_core", "doctor"),
        "example": ("examples/train_char_gpt.py", "--steps", "20", "--out", results),
        "models": models,
    }
    for package in ("tpu-core", "tpu-eager"):
        report = f"--junit-xml={results / package}.xml"
        steps[f"tests of {package}"] = (*tests, f"packages/{package}/tests", report)
    chosen = options.steps.split(",") if options.steps else [name.split()[0] for name in steps]
    ended = {
        name: run(platform, *step, seconds=options.seconds)
        for name, step in steps.items()
        if name.split()[0] in chosen
    }
    for name, well in ended.items():
        print(f"{name}: {'ended well' if well else 'FAILED'}")
    return 0 if all(ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

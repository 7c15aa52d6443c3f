"""Wheels of all packages for the Python that runs this, in ``dist/``.

``python tools/wheels.py --torch 2.13,2.14`` puts the extension built for each of these minor
releases of torch into the wheel of tpu-core, which loads the one that fits. Each needs an
environment with that torch: those of the nox sessions serve, and what is missing is created beside
them. Without the option the wheel has the build for the torch that is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "packages" / "tpu-core"
# In the order of their dependencies.
PACKAGES = ("tpu-core", "tpu-eager", "tpu-compile", "tpu-kernels", "tpu-distributed")
ENVIRONMENTS = ROOT / ".nox"
PYTHON = ".".join(map(str, sys.version_info[:2]))
# What building needs besides torch.
TOOLS = ("setuptools>=77", "packaging", "numpy", "ninja")
BUILD = re.compile(r"tpu_core/_extensions/torch_(\d+)_(\d+)/_C\.")


def minor(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


def run(*command: str | Path, cwd: Path = ROOT, variables: Mapping[str, str] | None = None) -> None:
    """Run a command quietly; its output is printed if it fails.

    Raises:
        SystemExit: It failed.
    """
    bin_folder = Path(command[0]).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    env |= variables or {}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")


def environment_with(torch: str) -> Path:
    """Python of an environment with a minor release of torch, which is created if there is none."""
    libraries = f"*/lib/python{PYTHON}/site-packages/torch-{torch}.*.dist-info"
    for found in sorted(ENVIRONMENTS.glob(libraries)):
        return found.parents[3] / "bin" / "python"
    folder = ENVIRONMENTS / f"build-{PYTHON}-{torch}"
    print(f"creating {folder.relative_to(ROOT)}", flush=True)
    run(sys.executable, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"torch=={torch}.*", *TOOLS)
    return python


def build_extension(torch: str) -> None:
    """Build the extension for a minor release of torch, if there is none of these sources."""
    extension = runpy.run_path(str(CORE / "src" / "tpu_core" / "_extension.py"))
    found = extension["builds"]().get(torch)
    if found and extension["is_current"](found):
        return
    print(f"extension for Python {PYTHON} and torch {torch}", flush=True)
    own = minor(metadata.version("torch"))
    python = Path(sys.executable) if torch == own else environment_with(torch)
    run(python, "setup.py", "-q", "build_ext", "--inplace", cwd=CORE)


def make_wheel(package: str, folder: Path, builds: str = "") -> None:
    options = ("--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    project = ROOT / "packages" / package
    tool = (sys.executable, "-m", "pip", "wheel")
    variables = {"TPU_CORE_BUILDS": builds}
    run(*tool, *options, "--wheel-dir", folder, project, variables=variables)


def set_manylinux_tag(wheel: Path, folder: Path) -> None:
    """Write a wheel with the manylinux tag that its symbols allow; torch's libraries stay outside.

    The tag says what the system must have (glibc, libstdc++): it depends on where this is built.
    """
    excluded = ("libtorch*", "libc10*", "libshm*")
    options = [part for pattern in excluded for part in ("--exclude", pattern)]
    tool = (sys.executable, "-m", "auditwheel", "repair")
    run(*tool, *options, "--wheel-dir", folder, wheel)


def builds_in(wheel: Path) -> list[str]:
    """The minor releases of torch whose builds are in a wheel of tpu-core."""
    with zipfile.ZipFile(wheel) as archive:
        found = [BUILD.match(name) for name in archive.namelist()]
    return [f"{m[1]}.{m[2]}" for m in found if m]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch", help="minor releases, as in 2.13,2.14; the installed by default")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--core-alone", action="store_true", help="the others serve every Python")
    options = parser.parse_args()
    wanted = (options.torch or minor(metadata.version("torch"))).split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    for torch in wanted:
        build_extension(torch)
    raw = CORE / "build" / "wheels"
    # What setuptools copied for an earlier wheel would go into this one as well.
    for stale in (raw, *CORE.glob("build/lib*"), *CORE.glob("build/bdist*")):
        shutil.rmtree(stale, ignore_errors=True)
    make_wheel("tpu-core", raw, ",".join(wanted))
    (wheel,) = raw.glob("tpu_core-*.whl")
    set_manylinux_tag(wheel, options.out)
    for package in () if options.core_alone else PACKAGES[1:]:
        make_wheel(package, options.out)
    for made in sorted(options.out.glob("*.whl")):
        builds = f"  torch {', '.join(builds_in(made))}" if made.name.startswith("tpu_core") else ""
        print(f"{made.name}  {made.stat().st_size / 1024:.0f} KiB{builds}")


if __name__ == "__main__":
    main()

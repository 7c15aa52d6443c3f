"""Wheels of all packages for the Python that runs this, in ``dist/``.

``python tools/wheels.py --torch 2.13,2.14`` puts the extension built for each of these minor
releases of torch into the wheels of tpu-core and tpu-distributed, which load the one that fits.
Each needs an environment with that torch: those of the nox sessions serve, and what is missing is
created beside them. Without the option the wheels have the build for the torch that is installed.
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
# Headers and build of extensions, also in an environment that has torch alone.
BUILD_PATH = {"PYTHONPATH": str(CORE / "src")}
# In the order of their dependencies.
PACKAGES = ("tpu-core", "tpu-eager", "tpu-compile", "tpu-kernels", "tpu-distributed")
EXTENSIONS = ("tpu-core", "tpu-distributed")
ENVIRONMENTS = ROOT / ".nox"
PYTHON = ".".join(map(str, sys.version_info[:2]))
# What building needs besides torch.
TOOLS = ("setuptools>=77", "packaging", "numpy", "ninja")
BUILD = re.compile(r"\w+/_extensions/torch_(\d+)_(\d+)/_C\.")


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


def build_extension(package: str, torch: str) -> None:
    """Build an extension for a minor release of torch, if there is none of these sources."""
    project, name = ROOT / "packages" / package, package.replace("-", "_")
    loading = runpy.run_path(str(CORE / "src" / "tpu_core" / "cpp_extension.py"))
    extension = loading["Extension"](name, project / "src" / name)
    found = extension.builds().get(torch)
    if found and extension.is_current(found):
        return
    print(f"extension of {package} for Python {PYTHON} and torch {torch}", flush=True)
    own = minor(metadata.version("torch"))
    python = Path(sys.executable) if torch == own else environment_with(torch)
    command = (python, "setup.py", "-q", "build_ext", "--inplace")
    run(*command, cwd=project, variables=BUILD_PATH)


def make_wheel(package: str, folder: Path, builds: str = "") -> None:
    options = ("--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    project = ROOT / "packages" / package
    tool = (sys.executable, "-m", "pip", "wheel")
    variables = {"TPU_CORE_BUILDS": builds, **BUILD_PATH}
    run(*tool, *options, "--wheel-dir", folder, project, variables=variables)


def make_wheel_with_builds(package: str, folder: Path, torches: list[str]) -> None:
    """Make the wheel of a package with an extension, built for minor releases of torch."""
    for torch in torches:
        build_extension(package, torch)
    project = ROOT / "packages" / package
    raw = project / "build" / "wheels"
    # What setuptools copied for an earlier wheel would go into this one as well.
    for stale in (raw, *project.glob("build/lib*"), *project.glob("build/bdist*")):
        shutil.rmtree(stale, ignore_errors=True)
    make_wheel(package, raw, ",".join(torches))
    (wheel,) = raw.glob("*.whl")
    set_manylinux_tag(wheel, folder)


def set_manylinux_tag(wheel: Path, folder: Path) -> None:
    """Write a wheel with the manylinux tag that its symbols allow; torch's libraries stay outside.

    The tag says what the system must have (glibc, libstdc++): it depends on where this is built.
    """
    excluded = ("libtorch*", "libc10*", "libshm*")
    options = [part for pattern in excluded for part in ("--exclude", pattern)]
    tool = (sys.executable, "-m", "auditwheel", "repair")
    run(*tool, *options, "--wheel-dir", folder, wheel)


def builds_in(wheel: Path) -> list[str]:
    """The minor releases of torch for which a wheel has builds of an extension."""
    with zipfile.ZipFile(wheel) as archive:
        found = [BUILD.match(name) for name in archive.namelist()]
    return [f"{m[1]}.{m[2]}" for m in found if m]


def described(archive: Path) -> str:
    """Name and size of a wheel or another file, and the builds in it."""
    builds = builds_in(archive) if archive.suffix == ".whl" else []
    torches = f"  torch {', '.join(builds)}" if builds else ""
    return f"{archive.name}  {archive.stat().st_size / 1024:.0f} KiB{torches}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch", help="minor releases, as in 2.13,2.14; the installed by default")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--extensions-alone", action="store_true", help="the others serve every Python"
    )
    options = parser.parse_args()
    wanted = (options.torch or minor(metadata.version("torch"))).split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    for package in EXTENSIONS:
        make_wheel_with_builds(package, options.out, wanted)
    if not options.extensions_alone:
        for package in PACKAGES:
            if package not in EXTENSIONS:
                make_wheel(package, options.out)
    for made in sorted(options.out.glob("*.whl")):
        print(described(made))


if __name__ == "__main__":
    main()

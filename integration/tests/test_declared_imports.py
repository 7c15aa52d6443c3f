"""Tests of a package import no other of these packages than its ``pyproject.toml`` names."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
NAMES = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))


def declared(package: str) -> set[str]:
    """Packages of this repository that a package or its dependency group ``test`` names."""
    data = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())
    requirements = data["project"]["dependencies"] + data["dependency-groups"]["test"]
    return {name for name in NAMES for text in requirements if text.startswith(name)}


def imports(path: Path) -> Iterator[str]:
    """Packages of this repository that a file imports, as distributions are named."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [str(node.module)]
        names = {module.partition(".")[0].replace("_", "-") for module in modules}
        yield from names & set(NAMES)


@pytest.mark.parametrize("package", NAMES)
def test_what_tests_import_is_declared(package: str) -> None:
    allowed = {package, *declared(package)}
    files = sorted((PACKAGES / package / "tests").rglob("*.py"))
    assert files
    found = {(path.name, name) for path in files for name in imports(path)}
    assert {(file, name) for file, name in found if name not in allowed} == set()


def test_tests_of_the_core_need_no_other_package() -> None:
    assert declared("tpu-core") == set()

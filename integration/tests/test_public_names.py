"""Tests and benchmarks across packages use the packages as their users do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDERS = [Path(__file__).parents[1], Path(__file__).parents[2] / "examples"]
PUBLIC_MODULES = {
    "tpu_core",
    "tpu_core.config",
    "tpu_core.conformance",
    "tpu_core.errors",
    "tpu_core.tiers",
    "tpu_eager",
    "tpu_kernels",
}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import in a file; the name is empty where a module is imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def is_public(module: str, name: str) -> bool:
    if module.split(".")[0] not in ("tpu_core", "tpu_eager", "tpu_kernels"):
        return True
    return module in PUBLIC_MODULES and not name.startswith("_")


def test_only_public_names_are_imported() -> None:
    files = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]
    assert files
    private = [(p.name, m, n) for p in files for m, n in imports(p) if not is_public(m, n)]
    assert private == []

"""Keys follow the sources that shape programs: no edit and no move leaves one unchanged."""

from __future__ import annotations

import shutil
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from interpreter import clean, path_with
from tpu_core.cache.sources import PATTERNS, digest_around, folder_digest, package_digest
from tpu_core.compiler.programs import source_versions

PACKAGES = sorted(
    {n.replace("-", "_") for d in distributions() if (n := d.name).startswith("tpu-")}
)


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a package's sources."""
    spec = find_spec(request.param)
    assert spec is not None and spec.submodule_search_locations
    (source,) = map(Path, spec.submodule_search_locations)
    for file in (f for p in PATTERNS for f in source.rglob(p)):
        target = tmp_path / source.name / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    assert folder_digest(tmp_path / source.name) == package_digest(request.param)
    return tmp_path / source.name


@pytest.mark.parametrize("copy", PACKAGES, indirect=True)
def test_a_file_that_moves_makes_another_key(copy: Path) -> None:
    seen = {folder_digest(copy)}
    files = sorted(copy.rglob("*.py"))
    chosen = files[:: -(-len(files) // 4)]
    for i, file in enumerate(chosen):
        (copy / "moved").mkdir(exist_ok=True)
        moved = file.rename(copy / "moved" / file.name)
        seen.add(folder_digest(copy))
        moved.rename(file)
        renamed = file.rename(file.with_name(f"_{file.name}"))
        seen.add(folder_digest(copy))
        text = renamed.rename(file).read_text()
        file.write_text(f"{text}# {i}")
        seen.add(folder_digest(copy))
        file.write_text(text)
        assert len(seen) == 3 * i + 4
        assert folder_digest(copy) in seen  # back where it was


def test_text_that_moves_between_files_makes_another_key(tmp_path: Path) -> None:
    seen = set()
    for first, second in (("a = 1\n", ""), ("", "a = 1\n")):
        (tmp_path / "first.py").write_text(first)
        (tmp_path / "second.py").write_text(second)
        seen.add(folder_digest(tmp_path))
    assert len(seen) == 2


def test_every_source_of_this_package_is_in_the_key_of_each_program() -> None:
    assert package_digest("tpu_core") in source_versions()
    with pytest.raises(ModuleNotFoundError, match="no package 'tpu_nowhere'"):
        package_digest("tpu_nowhere")


def test_a_file_in_no_package_counts_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("a = 1")
    before = digest_around(script)
    (tmp_path / "other.py").write_text("b = 1")
    assert digest_around(script) == before
    (tmp_path / "__init__.py").touch()
    assert digest_around(script) != before
    with pytest.raises(OSError):
        digest_around(tmp_path / "typed_in.py")


OP = """
import torch
from helped.rules.factor import FACTOR
from tpu_core.lowering.registry import register

library = torch.library.Library("helped", "DEF")
library.define("scaled(Tensor x) -> Tensor")
library.impl("scaled", torch.empty_like, "Meta")
register("helped.scaled.default", lambda x: x * FACTOR)
torch.zeros(1, device="tpu")
from tpu_core import _C
_C.register_overloads(["helped::scaled"])
"""

PROGRAM = """
import torch, helped.op
x = torch.arange(4.0, device="tpu")
print(torch.ops.helped.scaled(x).tolist(), torch.tpu.metrics()["compiles"] > 0)
"""


def test_a_helper_of_an_op_of_another_package_is_in_its_key(tmp_path: Path) -> None:
    package = tmp_path / "helped"
    (package / "rules").mkdir(parents=True)
    for file, text in {
        "__init__.py": "",
        "rules/__init__.py": "",
        "rules/factor.py": "FACTOR = 2.0",
        "op.py": OP,
    }.items():
        (package / file).write_text(text)
    environment = {"TPU_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path_with(tmp_path)}
    assert clean(PROGRAM, **environment) == "[0.0, 2.0, 4.0, 6.0] True\n"
    assert clean(PROGRAM, **environment) == "[0.0, 2.0, 4.0, 6.0] False\n"
    (package / "rules" / "factor.py").write_text("FACTOR = 3.0")
    assert clean(PROGRAM, **environment) == "[0.0, 3.0, 6.0, 9.0] True\n"

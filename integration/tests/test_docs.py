"""The documentation says what the code does: generated pages and the executed tutorials."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "--- end of block ---"


def run(*arguments: str | Path, text: str | None = None) -> str:
    # As for a reader: a page that is about programs says which tier it wants.
    own = ("TPU_TIERS", "TPU_RECOMPILE_LIMIT")
    env = {name: value for name, value in os.environ.items() if name not in own}
    env["KINETO_LOG_LEVEL"] = "99"  # PyTorch 2.13 logs each profile to stderr
    # Shares of time are those of the machine and of the load on it.
    env["PYTHONWARNINGS"] = "ignore:[TPU1017]"
    result = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=env,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Python blocks of a page, each with the text block that follows it, if any."""
    fences = FENCE.findall(page.read_text())
    found = []
    for i, (language, code) in enumerate(fences):
        if language == "python":
            following = fences[i + 1] if i + 1 < len(fences) else ("", "")
            found.append((code, following[1] if following[0] == "text" else None))
    return found


def test_reference_pages_are_those_the_code_generates() -> None:
    run("docs/generate.py", "--check")


@pytest.mark.parametrize(
    "page",
    [
        "tutorials/quickstart.md",
        "tutorials/make-it-fast.md",
        "tutorials/kill-recompilations.md",
        "tutorials/find-a-wrong-number.md",
        "tutorials/profile-it.md",
        "tutorials/where-did-the-memory-go.md",
        "tutorials/torch-compile.md",
        "tutorials/bring-your-jax-function.md",
        "tutorials/write-a-pallas-kernel.md",
        "tutorials/kernels.md",
        "tutorials/plan-a-pod.md",
        "tutorials/control-flow.md",
        "tutorials/dynamic-shapes.md",
        "reference/cache.md",
        "index.md",
        "../README.md",
    ],
)
def test_code_on_the_page_prints_what_the_page_shows(page: str) -> None:
    steps = blocks(ROOT / "docs" / page)
    assert steps
    program = "".join(f"{code}\nprint({MARK!r})\n" for code, _ in steps)
    printed = run("-", text=program).split(f"{MARK}\n")
    checker = doctest.OutputChecker()
    for (code, expected), actual in zip(steps, printed):
        if expected is not None:
            matches = checker.check_output(expected, actual, doctest.ELLIPSIS)
            assert matches, f"{code}\nprints\n{actual}\nand the page shows\n{expected}"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of capabilities of its own, read by ``docs/capabilities.py``."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    capabilities = importlib.import_module("capabilities")
    monkeypatch.setattr(capabilities, "TABLE", tmp_path / "capabilities.toml")
    return tmp_path / "capabilities.toml"


@pytest.mark.parametrize(
    ("status", "tests", "complaint"),
    [
        ("works", [], "name the tests"),
        ("works", ["integration/tests/test_of_nothing.py"], "no test that always runs"),
        ("works", ["integration/tests/test_aot_distributed.py"], "no test that always runs"),
        ("partly", ["integration/tests/test_docs.py"], "what is missing"),
        ("done", ["integration/tests/test_docs.py"], "is none of works, partly, planned"),
    ],
)
def test_capability_without_a_test_cannot_say_works(table, status, tests, complaint) -> None:
    from capabilities import capabilities

    row = f'name = "x"\npackages = ["tpu-core"]\nstatus = "{status}"\ntests = {tests}\n'
    table.write_text(f"[[capability]]\n{row}")
    with pytest.raises(ValueError, match=complaint):
        capabilities()
    table.write_text(
        '[[capability]]\nname = "x"\npackages = ["tpu-core"]\nstatus = "works"\n'
        'tests = ["integration/tests/test_docs.py"]\n'
    )
    assert [row.name for row in capabilities()] == ["x"]


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if not t.startswith("https:")]
    assert targets
    # Reference pages are committed, so they are there in a fresh clone too.
    assert [t for t in targets if not (ROOT / t).exists()] == []

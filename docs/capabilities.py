"""The table of what works: ``capabilities.toml``, checked and written where a reader looks for it.

README.md, docs/index.md and the README.md of each package hold it between two comments, the
packages their own rows; ``reference/capabilities.md`` adds the tests. ``generate.py`` writes them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TABLE = DOCS / "capabilities.toml"
STATUSES = ("works", "partly", "planned")
BEGIN, END = "<!-- capabilities -->", "<!-- end of capabilities -->"
EXCLUDED = {"slow", "skip", "xfail"}
LINK = re.compile(r"\]\((?!https?:|#)")


@dataclass(frozen=True)
class Capability:
    """A row: what it is, in which packages, how far it works, and the tests that show it.

    Args:
        name: Markdown, with links relative to ``docs/``.
        packages: Names of packages, ``tpu-core``.
        status: One of ``works``, ``partly``, ``planned``.
        tests: Files of tests relative to the repository's root.
        limit: A clause: what is missing, or how far it goes.
    """

    name: str
    packages: tuple[str, ...]
    status: str
    tests: tuple[str, ...]
    limit: str = ""

    def text(self) -> str:
        """The cell of the column *Status*."""
        mark = ";" if self.status == "works" else ":"
        return f"{self.status}{mark} {self.limit}" if self.limit else self.status


def always_run(file: Path) -> int:
    """Number of test functions in a file that run on every change.

    A test marked slow, skipped or expected to fail does not count, and none in a module that is.
    """
    tree = ast.parse(file.read_text())

    def excluded(nodes: list[ast.expr]) -> bool:
        found = {n.attr for node in nodes for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        return bool(found & EXCLUDED)

    for node in tree.body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if isinstance(node, ast.Assign) and "pytestmark" in names and excluded([node.value]):
            return 0
    return sum(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not excluded(node.decorator_list)
        for node in ast.walk(tree)
    )


def capabilities() -> list[Capability]:
    """All rows, in the order of the table.

    Raises:
        ValueError: A status or package that does not exist, a test file without a test that always
            runs, *works* without a test, or anything else without saying what is missing.
    """
    rows = []
    for row in tomllib.loads(TABLE.read_text())["capability"]:
        entry = Capability(
            **{**row, "packages": tuple(row["packages"]), "tests": tuple(row["tests"])}
        )
        where = f"{TABLE.name}: {entry.name!r}"
        if entry.status not in STATUSES:
            raise ValueError(f"{where}: status {entry.status!r} is none of {', '.join(STATUSES)}.")
        for package in entry.packages:
            if not (ROOT / "packages" / package).is_dir():
                raise ValueError(f"{where}: there is no package {package!r}.")
        for test in entry.tests:
            if not (ROOT / test).is_file() or not always_run(ROOT / test):
                raise ValueError(f"{where}: {test} has no test that always runs.")
        if entry.status == "works" and not entry.tests:
            raise ValueError(f"{where}: name the tests that show that it works.")
        if entry.status != "works" and not entry.limit:
            raise ValueError(f"{where}: say in `limit` what is missing.")
        rows.append(entry)
    return rows


def table(prefix: str, package: str | None = None) -> str:
    """Markdown of the table, for a page from which ``docs/`` is at ``prefix``."""
    rows = [r for r in capabilities() if package is None or package in r.packages]
    lines = [f"| {r.name} | {r.text()} |" for r in rows]
    body = "\n".join(["| Capability | Status |", "|---|---|", *lines])
    return LINK.sub(f"]({prefix}", body)


def capabilities_page() -> str:
    """Markdown of ``reference/capabilities.md``."""
    rows = [
        f"| {r.name} | {r.text()} | {'<br>'.join(f'`{Path(t).name}`' for t in r.tests)} |"
        for r in capabilities()
    ]
    return (
        "# Capabilities\n\n"
        "Capabilities of the packages, and the tests that show them. A row says *works* where\n"
        "such tests run on every change.\n\n"
        "| Capability | Status | Tests |\n|---|---|---|\n"
        + LINK.sub("](../", "\n".join(rows))
        + "\n"
    )


def pages_with_table() -> dict[Path, str]:
    """Content of each page that holds the table, with the table as it is to be.

    Raises:
        ValueError: A page has lost the comments between which the table stands.
    """
    places: dict[Path, tuple[str, str | None]] = {
        ROOT / "README.md": ("docs/", None),
        DOCS / "index.md": ("", None),
    }
    for path in sorted((ROOT / "packages").glob("*/README.md")):
        places[path] = ("../../docs/", path.parent.name)
    found = {}
    for path, (prefix, package) in places.items():
        text = path.read_text()
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise ValueError(f"{path} needs the comments {BEGIN} and {END}, once each.")
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        found[path] = f"{before}{BEGIN}\n{table(prefix, package)}\n{END}{after}"
    return found

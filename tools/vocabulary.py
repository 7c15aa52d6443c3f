"""Vocabulary check of sources and docs: coined terms, docstrings and entries of docstrings that
begin with a question word.

``python tools/vocabulary.py`` prints each finding with the term to use and exits with status 1.
Decision records and changelogs are history and are not checked. The terms are in
``docs/explanation/glossary.md``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("packages/*/src/**/*.py", "docs/*.md", "docs/**/*.md", "packages/*/README.md", "*.md")
HISTORY = ("docs/adr/", "CHANGELOG.md")

# A regular expression, and the term of the field in its place.
TERMS = {
    r"\blifted numbers?\b|\bLiftedNumber\b": "runtime scalar, RuntimeScalar",
    r"\bwhoever (reads|calls|waits|needs|asks|is alive)\b": "the caller, thread or rank",
    r"\b(run|runs|running) in pieces\b": "op by op",
    r"\bcarried out\b": "executed",
    r"\bTPUs that are not there\b": "a TPU topology; ahead of time",
    r"\bnobody has to call\b": "automatic kernel selection",
    r"\bunless a block says else\b": "defaults to",
    r"\bUnpaddable\b": "NotPaddableError",
    r"\b_?Untold\b|\bOpenSize\b|\bOpenGraph\b": "DynamicSize, DynamicGraph",
    r"\bTwins\b|\bStandIns\b": "MetaReplicas, PlaceholderArgs",
    r"\b_GeometryAlone\b": "_ShapeOnlyMode",
    r"\brun_counted\b": "run_with_dynamic_counts",
    r"\bOnHosts\b": "HostExecutor",
}
QUESTION = re.compile(
    r"(what|which|who|whose|whoever|nobody|somebody|how|where|when|why|whether)\b", re.IGNORECASE
)


def coined(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each coined term."""
    for pattern, term in TERMS.items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"'{match[0]}': use {term}"


def questions(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each docstring of Python that begins with a question word."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            match = QUESTION.match(ast.get_docstring(node) or "")
            if match:
                line = node.body[0].lineno
                yield line, f"'{match[0]}' begins a docstring: begin with a noun or imperative verb"


def entries(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each entry of a docstring, ``name: text``, that begins with a question
    word. An entry that says whether something holds is a flag's.
    """
    for match in re.finditer(r"^ +\w+(?:, \w+)*: ([A-Z]\w+)\b(?=[ ,])", text, re.MULTILINE):
        if QUESTION.fullmatch(match[1]) and match[1] != "Whether":
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"'{match[1]}' begins an entry: begin with a noun or imperative verb"


def headings(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each heading of Markdown that begins with a question word."""
    for match in re.finditer(r"^#+ +(\w+)", text, re.MULTILINE):
        if QUESTION.fullmatch(match[1]):
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"'{match[1]}' begins a heading: begin with a noun or imperative verb"


def main() -> int:
    """Check the files that git knows; the exit status."""
    command = ["git", "-C", str(ROOT), "ls-files", *(f":(glob){pattern}" for pattern in CHECKED)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    count = 0
    for name in listed:
        path = ROOT / name
        if any(part in name for part in HISTORY) or not path.is_file():
            continue
        text = path.read_text()
        checks = (questions, entries) if path.suffix == ".py" else (headings,)
        found = [*coined(text), *(finding for check in checks for finding in check(text))]
        for line, message in sorted(found):
            print(f"{name}:{line}: {message}")
        count += len(found)
    if count:
        print(f"{count} findings; the terms are in docs/explanation/glossary.md")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

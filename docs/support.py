"""The matrix of supported releases: what ran on which, and the page that says so.

``python docs/support.py record --junit FOLDER`` adds the results that pytest wrote on the versions
that are installed to ``support.json``; `nox -s combination` does. With ``--again`` they are of
tests that had failed, and the rest of the suite stays as it was. ``generate.py`` writes the page.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

DATA = Path(__file__).with_name("support.json")
VERSIONS = ("python", "torch", "jax")


def outcomes(file: Path) -> dict[str, Any]:
    """What became of the tests in a file of JUnit's format."""
    counts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": 0, "failures": []}
    for name, outcome in cases(file):
        counts[outcome] += 1
        if outcome == "failed":
            counts["failures"].append(name)
    counts["failures"].sort()
    return counts


def cases(file: Path) -> Iterator[tuple[str, str]]:
    """Names and outcomes of the tests in a file of JUnit's format."""
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        module = case.get("classname", "").split(".tests.")[-1]
        outcome = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        yield f"{module}::{case.get('name')}", outcome


def amend(suite: dict[str, Any], file: Path) -> None:
    """Give tests of a suite the outcomes that they have in a later run of them."""
    for name, outcome in cases(file):
        failed = name in suite["failures"]
        if failed == (outcome == "failed"):
            continue
        suite["failed" if failed else "passed"] -= 1
        suite[outcome] += 1
        suite["failures"] = sorted({*suite["failures"]} ^ {name})


def record(junit: Path, again: bool) -> None:
    """Put the results in ``junit/<suite>.xml`` in the place of earlier ones of these versions."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    installed |= {name: metadata.version(name).split("+")[0] for name in ("torch", "jax")}
    runs = json.loads(DATA.read_text()) if DATA.exists() else []
    known = [run for run in runs if all(run[name] == installed[name] for name in VERSIONS)]
    (run,) = known or [{**installed, "suites": {}}]
    runs += [] if known else [run]
    for file in sorted(junit.glob("*.xml")):
        if again:
            amend(run["suites"][file.stem], file)
        else:
            run["suites"][file.stem] = outcomes(file)
    runs.sort(key=lambda r: [[int(n) for n in r[name].split(".")] for name in VERSIONS])
    DATA.write_text(json.dumps(runs, indent=1) + "\n")


def support_page() -> str:
    """Markdown of ``reference/support.md``."""
    runs = json.loads(DATA.read_text())
    out = [
        "# Supported releases",
        "",
        "The packages install with Python 3.11 to 3.14, torch 2.11 to 2.15, and jax and jaxlib",
        "0.10 to 0.12. What was run on a combination of them is here, with each test that fails:",
        "`nox -s versions` writes them here. `tpu_core` uses private interfaces of both",
        "libraries, so that a combination which is not in the table may show faults that no test",
        "has met. Tests that failed were run again alone once they were mended. *Example from the",
        "wheels* is 20 steps of the quickstart in an environment that has the wheels. Continuous",
        "integration runs all tests on Python 3.11, torch 2.13 and jax 0.10.2.",
        "",
        "| Python | torch | jax | Suite | Passed | Skipped | Failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        versions = " | ".join(run[name] for name in VERSIONS)
        for suite, seen in run["suites"].items():
            out.append(
                f"| {versions} | {suite} | {seen['passed']} | {seen['skipped']} | "
                f"{seen['failed']} |"
            )
    out += [
        "",
        "All of it ran on XLA's CPU platform. Nothing here says that it works on a TPU. Of a GPU",
        "[the page on installing](../install.md#on-a-gpu) says what was seen. Python 3.14 has not",
        "been tried.",
    ]
    for run in runs:
        failures = [(s, name) for s, seen in run["suites"].items() for name in seen["failures"]]
        if failures:
            title = f"## Failures on Python {run['python']}, torch {run['torch']}, jax {run['jax']}"
            out += ["", title, "", *(f"* {suite}: `{name}`" for suite, name in failures)]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record what tests showed on these versions.")
    parser.add_argument("command", choices=["record"])
    parser.add_argument("--junit", type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="of tests that had failed")
    options = parser.parse_args()
    record(options.junit, options.again)

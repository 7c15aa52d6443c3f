"""Write the reference pages that are made from the code: ``python docs/generate.py [--check]``.

Each page has one source: the error classes, the interface for other packages, the configuration's
fields, the registry of lowerings, the tables of kernels, of the device contract and of known
faults, the results of the tests on the supported releases. The table of capabilities stands in
pages that are otherwise written by hand. ``--check`` writes nothing and fails if a page is out of
date.

Links to ``source/<file>.md`` lead to the project's own sources, so that they work in a site without
a repository beside it: the pages are written for the files that are linked, and are not committed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections import Counter
from pathlib import Path

from capabilities import capabilities_page, pages_with_table
from support import support_page

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
PACKAGES = DOCS.parent / "packages"
OVERLOADS = DOCS.parent / "integration" / "conformance" / "overloads.json"
SOURCE_LINK = re.compile(r"\]\((?:\.\./)*source/([^)#]+)\.md\)")


def ops_page() -> str:
    """Markdown of ``ops.md``: every ATen overload with a lowering, by family."""
    from tpu_core import lowering
    from tpu_core.lowering.registry import REGISTRY

    lowering.load()
    # Those of the kernel library, which is there if it was imported, have a page of their own.
    entries = [entry for entry in REGISTRY if not entry.op.startswith("tpu_kernels.")]
    families = Counter(entry.family for entry in entries)
    out = [
        "# Ops",
        "",
        f"{len(entries)} functional overloads of ATen have a lowering to StableHLO. Their",
        "in-place and `out=` variants come with them. Views need none: they are geometry. An op",
        "without a lowering of its own runs through PyTorch's decomposition; failing that it runs",
        "on the CPU, which is counted and warned about once (`TPU_FALLBACK`). `tpu ops` prints",
        "this list.",
        "",
        "Numbers such as a learning rate are inputs of the compiled program, so that changing them",
        "compiles nothing, except those in the column *compiled in*.",
        "",
        "| Family | Overloads |",
        "|---|---|",
    ]
    out += [f"| [{name}](#{name}) | {count} |" for name, count in sorted(families.items())]
    for family in sorted(families):
        # The family's name as it is: its anchor is the same for every builder.
        out += [
            "",
            f"## {family}",
            "",
            "| Overload | Numbers compiled in | Random |",
            "|---|---|---|",
        ]
        for entry in entries:
            if entry.family == family:
                static = ", ".join(f"`{name}`" for name in sorted(entry.static))
                out.append(f"| `{entry.op}` | {static} | {'yes' if entry.random else ''} |")
    return "\n".join([*out, *_database()]) + "\n"


def _database() -> list[str]:
    """Lines of the table of PyTorch's own database: how each op runs, in float32."""
    from tpu_core.cli.ops import is_registered

    found = json.loads(OVERLOADS.read_text())
    rows = []
    for name, seen in found.items():
        if seen is None:
            rows.append((name, "not supported", ""))
        elif seen["fallbacks"]:
            rows.append((name, "fallback", ", ".join(f"`{op}`" for op in seen["fallbacks"])))
        else:
            others = [op for op in seen["overloads"] if not is_registered(op)]
            kind = "decomposed" if others else "native"
            rows.append((name, kind, ", ".join(f"`{op}`" for op in others)))
    counts = Counter(kind for _, kind, _ in rows)
    return [
        "",
        "## PyTorch's database",
        "",
        f"The {len(rows)} entries of OpInfo with float32: `native` where each overload that",
        "reaches the device is a view or has a lowering, `decomposed` where one runs by PyTorch's",
        "decomposition or by code of the device's own around other overloads, `fallback` where one",
        "runs on the CPU. The overloads behind the last two are named.",
        "",
        "| Runs | Entries |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in counts.most_common()),
        "",
        "| Op | Runs | Overloads |",
        "|---|---|---|",
        *(f"| `{name}` | {kind} | {which} |" for name, kind, which in rows),
    ]


def pages() -> dict[str, str]:
    """Content of each generated page by file name."""
    from tpu_core.config.page import config_page
    from tpu_core.conformance import contract_page
    from tpu_core.errors.page import errors_page
    from tpu_core.extend._page import extend_page
    from tpu_core.pjrt.known_faults import faults_page
    from tpu_kernels.ops.page import kernels_page

    return {
        "capabilities.md": capabilities_page(),
        "configuration.md": config_page(),
        "device-contract.md": contract_page(),
        "errors.md": errors_page(),
        "extend.md": extend_page(),
        "known-faults.md": faults_page(),
        "kernels.md": kernels_page(),
        "ops.md": ops_page(),
        "support.md": support_page(),
    }


def source_page(name: str) -> str:
    """Markdown of a source file, ``tpu_core/csrc/recorder/record.cpp``.

    Raises:
        FileNotFoundError: No package has the file; a page links to what was moved.
    """
    path = PACKAGES / name.split("/")[0].replace("_", "-") / "src" / name
    language = {".cpp": "cpp", ".h": "cpp", ".py": "python"}[path.suffix]
    return (
        "---\nsearch:\n  exclude: true\n---\n"
        f"# {name}\n\n`{path.relative_to(DOCS.parent)}`\n\n"
        f"````{language}\n{path.read_text()}````\n"
    )


def source_pages() -> dict[str, str]:
    """Content of the page of each source file that another page links to."""
    links = (SOURCE_LINK.findall(p.read_text()) for p in DOCS.rglob("*.md"))
    names = sorted({name for found in links for name in found})
    return {f"source/{name}.md": source_page(name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    check = parser.parse_args().check
    for name, text in source_pages().items():
        if not check:
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / name).write_text(text)
    stale = False
    generated = {REFERENCE / name: text for name, text in pages().items()}
    for path, text in (generated | pages_with_table()).items():
        current = path.read_text() if path.exists() else ""
        if current == text:
            continue
        stale = True
        if check:
            lines = current.splitlines(), text.splitlines()
            sys.stdout.writelines(
                f"{line}\n"
                for line in difflib.unified_diff(*lines, str(path), "generated", lineterm="")
            )
        else:
            path.write_text(text)
    if check and stale:
        print("Reference pages are out of date: run python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

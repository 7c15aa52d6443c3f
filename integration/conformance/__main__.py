"""PyTorch's databases on the device: ``nox -s conformance -- --shard 3/8``.

Each entry of OpInfo, ModuleInfo and OptimizerInfo is run on the CPU and on the device, in child
processes, one after another: a child that crashes is replaced, and the entry that ended it is
noted. Results are JSON lines in the output folder; entries that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.entries import PARTS, Entry, entries, expectation, verdict

FOLDER = Path(__file__).parent


def chosen(options: argparse.Namespace) -> list[Entry]:
    """Entries of this shard that the options name."""
    index, shards = map(int, options.shard.split("/"))
    parts = options.parts.split(",") if options.parts else PARTS
    dtypes = options.dtypes.split(",") if options.dtypes else None
    pattern = re.compile(options.only)
    # By op: an op's entries share programs.
    names = sorted({e.name for e in entries()})
    mine = set(names[index - 1 :: shards])
    return [
        e
        for e in entries()
        if e.name in mine
        and e.part in parts
        and (dtypes is None or str(e.dtype).removeprefix("torch.") in dtypes)
        and pattern.search(str(e))
    ]


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Results by entry, of all shards; a later one replaces an earlier one."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            result = json.loads(line)
            found[result["entry"]] = result
    return found


class Child:
    """A worker over a list of entries; `results` yields what it finds, crashes included."""

    def __init__(self, names: list[str], options: argparse.Namespace) -> None:
        self._names, self._options = names, options

    def results(self) -> Any:
        arguments = [
            "--samples",
            str(self._options.samples),
            "--seconds",
            str(self._options.seconds),
        ]
        paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [sys.executable, "-m", "conformance.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not self._options.verbose else None,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n".join(self._names).encode())
        process.stdin.close()
        running, buffer = None, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                # A child in native code does not see its alarm.
                if not selector.select(self._options.seconds + 120):
                    process.kill()
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    running = message.get("begins")
                    if running is None:
                        yield message
        code = process.wait()
        if running is not None:
            detail = f"the process ended with {code}"
            yield {"entry": running, "outcome": "crashed", "detail": detail, "fallbacks": []}


def run(todo: list[str], path: Path, options: argparse.Namespace) -> None:
    done = 0
    while done < len(todo):
        batch = todo[done : done + options.restart]
        count = 0
        with path.open("a") as file:
            for result in Child(batch, options).results():
                count += 1
                file.write(json.dumps(result) + "\n")
                file.flush()
                item = expectation(result["entry"])
                if verdict(result) in ("failed", "shrinks") or options.verbose:
                    expected = f" (expected: {item['reason']})" if item else ""
                    print(
                        result["entry"], result["outcome"], result["detail"], expected, flush=True
                    )
        if not count:
            raise SystemExit("A worker ended before its first entry: run with --verbose.")
        done += count


def group(entry: str) -> str:
    part, _, dtype = entry.split("/")
    if part in ("gradients", "gradgrad", "forward_mode"):
        return f"{part}, {'float32' if dtype == 'float32' else 'other dtypes'}"
    return (
        f"{part}, {'float32' if dtype == 'float32' else 'other dtypes'}"
        if part
        in (
            "forward",
            "out",
            "inplace",
        )
        else part
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: counts by part."""
    rows: dict[str, Counter[str]] = {}
    for name, result in results.items():
        row = rows.setdefault(group(name), Counter())
        row["run"] += 1
        row["fallback"] += bool(result["fallbacks"])
        row[verdict(result)] += 1
    order = sorted(rows, key=lambda r: (PARTS.index(r.split(",")[0]), r))
    lines = [
        "| Part | Entries | Passed | Expected differences | Failed | With a fallback |",
        "|---|---|---|---|---|---|",
    ]
    for name in order:
        r = rows[name]
        share = f"{r['fallback']} ({100 * r['fallback'] / r['run']:.1f}%)"
        lines.append(
            f"| {name} | {r['run']} | {r['passed']} | {r['expected']} | {r['failed']} | {share} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__.splitlines()[0])
    parser.add_argument("--shard", default="1/1", help="which of how many, 3/8")
    parser.add_argument("--parts", default="", help=",".join(PARTS))
    parser.add_argument("--dtypes", default="", help="float32,int64")
    parser.add_argument("--only", default="", help="a regular expression over names of entries")
    parser.add_argument("--samples", type=int, default=2, help="samples an op, 0 for all")
    parser.add_argument("--seconds", type=int, default=120, help="longest time of an entry")
    parser.add_argument("--restart", type=int, default=200, help="entries a child process")
    parser.add_argument("--out", type=Path, default=Path("conformance-results"))
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--failed", action="store_true", help="run what has failed, again")
    parser.add_argument("--list", action="store_true", help="name the entries and stop")
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = results_in(options.out)
    if options.table:
        print(table(results))
        return 0
    names = [str(e) for e in chosen(options)]
    if options.list:
        print("\n".join(names))
        return 0
    if options.failed:
        names = [n for n in names if n in results and results[n]["outcome"] != "passed"]
    elif not options.again:
        names = [n for n in names if n not in results]
    run(names, options.out / f"shard-{options.shard.replace('/', '-of-')}.jsonl", options)
    results = results_in(options.out)
    print(table(results))
    names = [str(e) for e in chosen(options)]
    unexpected = [n for n in names if verdict(results[n]) in ("failed", "shrinks")]
    for name in unexpected:
        print(name, results[name]["outcome"], results[name]["detail"])
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())

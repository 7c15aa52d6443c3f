"""A fixed share of PyTorch's databases, and the data file of expected differences.

``nox -s conformance`` runs the databases whole. Here is every op's forward in float32, through
dispatch, recording, views of operands, decompositions and fallbacks; the lowerings have tests of
their own.
"""

from __future__ import annotations

import fnmatch

import pytest

from conformance import __main__ as command
from conformance.entries import (
    MODULES,
    OPS,
    OPTIMIZERS,
    Entry,
    data,
    entries,
    expectation,
    verdict,
)
from conformance.worker import run

SAMPLES = 2
ALL = entries()
SUBSET = [e for e in ALL if str(e).startswith("forward/") and str(e).endswith("/float32")]
# Where the device once differed.
MENDED = [e for e in ALL if str(e) in data()["mended"]["entries"]]
# Of a pattern, the first and the last entry stand for all.
LISTED = [
    found[i]
    for item in data()["expected"]
    if (found := [e for e in ALL if fnmatch.fnmatchcase(str(e), item["entry"])])
    for i in sorted({0, len(found) - 1})
]


@pytest.mark.parametrize("entry", SUBSET, ids=str)
def test_forward(entry: Entry) -> None:
    _passes_unless_expected(entry)


@pytest.mark.parametrize("entry", MENDED, ids=str)
def test_mended(entry: Entry) -> None:
    _passes_unless_expected(entry)


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [e for e in ALL if e.part == "gradients" and str(e).endswith("/float32")],
    ids=str,
)
def test_gradients(entry: Entry) -> None:
    _passes_unless_expected(entry)


def _passes_unless_expected(entry: Entry) -> None:
    result = run(entry, SAMPLES)
    assert verdict(result) in ("passed", "expected"), result


@pytest.mark.parametrize("entry", dict.fromkeys(LISTED), ids=str)
def test_expected_differences_only_shrink(entry: Entry) -> None:
    result = run(entry, SAMPLES)
    may_pass = bool({"raises", "rounding"} & (expectation(entry) or {}).keys())
    assert verdict(result) in (("passed", "expected") if may_pass else ("expected",)), result


def test_data_file_names_what_there_is() -> None:
    names = [str(e) for e in ALL]
    for item in data()["expected"]:
        assert item["reason"]
        assert fnmatch.filter(names, item["entry"]), item["entry"]
    known = {*OPS, *MODULES, *OPTIMIZERS}
    for what in ("random", "uninitialized", "ties", "random_in_training", "indices_on_cpu"):
        assert set(data()[what]["names"]) <= known
    assert len(MENDED) == len(data()["mended"]["entries"])


def test_shards_cover_every_entry_once(tmp_path, monkeypatch, capsys) -> None:
    found: list[str] = []
    for shard in range(1, 4):
        argv = ["conformance", "--list", "--shard", f"{shard}/3", "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", argv)
        assert command.main() == 0
        found += capsys.readouterr().out.split()
    assert sorted(found) == sorted(map(str, ALL))


def test_a_crash_is_noted_and_the_rest_runs(tmp_path, monkeypatch, capsys) -> None:
    """The worker ends in its first entry; a second one resumes, and a third run finds all done."""
    monkeypatch.setenv("CONFORMANCE_CRASH", "forward/abs/float32")
    options = ["--only", "forward/(abs|neg)/float32$", "--out", str(tmp_path), "--samples", "1"]
    monkeypatch.setattr("sys.argv", ["conformance", *options])
    assert command.main() == 1
    assert "forward/abs/float32 crashed" in capsys.readouterr().out
    results = command.results_in(tmp_path)
    assert {n: r["outcome"] for n, r in results.items()} == {
        "forward/abs/float32": "crashed",
        "forward/neg/float32": "passed",
    }
    monkeypatch.delenv("CONFORMANCE_CRASH")
    monkeypatch.setattr("sys.argv", ["conformance", *options, "--failed"])
    assert command.main() == 0
    assert "| forward, float32 | 2 | 2 | 0 | 0 |" in capsys.readouterr().out

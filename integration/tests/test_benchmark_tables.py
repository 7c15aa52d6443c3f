"""Tables of the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import harness


def cells(printed: str) -> list[list[str]]:
    lines = printed.replace("┃", "│").splitlines()
    return [[c.strip() for c in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_values_stand_under_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    rows = [{"runner": "a", "ms": 1.5}, {"ms": 250.0, "compiles": 3, "runner": "b"}]
    harness.report("Title", rows, argparse.Namespace(json=file))
    head, *body = cells(capsys.readouterr().out)
    assert head == ["runner", "ms", "compiles"]
    assert body == [["a", "1.5", "-"], ["b", "250", "3"]]
    assert json.loads(file.read_text())["rows"] == rows


def test_without_rows_the_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    harness.report("Title", [], argparse.Namespace(json=file))
    assert json.loads(file.read_text())["rows"] == []

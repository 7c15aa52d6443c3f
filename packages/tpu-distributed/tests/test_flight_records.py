"""The table of flight records, and what it says of ranks that part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tpu_core.config import override
from tpu_distributed.flight_records import report
from tpu_distributed.flight_records.cli import app
from tpu_distributed.flight_records.recorder import FlightRecorder
from tpu_distributed.rendezvous import CollectiveCall

X = CollectiveCall("all_reduce", "sum", (((4,), torch.float32),))
BARRIER = CollectiveCall("barrier")


def recorder(
    rank: int, size: int, calls: list[CollectiveCall | str], run: str = "0" * 32
) -> FlightRecorder:
    """That of a rank which called some collectives; the last one failed where its name follows."""
    made = FlightRecorder()
    made.start(run, rank, size)
    record = None
    for number, call in enumerate(calls, 1):
        if isinstance(call, str):
            assert record is not None
            record.fail(call)
            continue
        if record is not None:
            record.finish()
        record = made.called("0", tuple(range(size)), number, call)
    return made


def dumped(folder: Path, *ranks: list[CollectiveCall | str]) -> list[report.Dump]:
    for rank, calls in enumerate(ranks):
        recorder(rank, len(ranks), calls).dump(folder)
    return report.read(folder)


def test_a_ring_keeps_the_last(tmp_path: Path) -> None:
    with override(flight_records=3):
        ring = recorder(0, 1, [X, X, BARRIER, X, X])
    assert [r["sequence"] for r in ring.records()] == [3, 4, 5]
    assert [r["state"] for r in ring.records()] == ["done", "done", "called"]
    (dump,) = (ring.dump(tmp_path), report.read(tmp_path))[1]
    assert dump.dropped == 2


class Array:
    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready

    def is_deleted(self) -> bool:
        return False


def test_what_the_device_has_computed() -> None:
    ring = FlightRecorder()
    ring.start(None, 0, 1)
    arrays = [Array(True), Array(True), Array(False)]
    for number, array in enumerate(arrays, 1):
        ring.issued(ring.called("0", (0,), number, X), [array])
    del array
    arrays[0] = Array(False)  # the first is gone; that the second is done says that it was, too
    assert [r["state"] for r in ring.records()] == ["done", "done", "issued"]
    arrays[2].ready = True
    assert ring.records()[2]["state"] == "done"


def test_ranks_that_agree(tmp_path: Path) -> None:
    dumps = dumped(tmp_path, [X, BARRIER], [X, BARRIER])
    assert report.findings(dumps) == []
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "No rank parts from the others." in result.output
    assert "all_reduce sum float32[4]" in result.output and "0-1" in result.output


def test_ranks_that_called_different_things(tmp_path: Path) -> None:
    dumps = dumped(tmp_path, [X, X, X, "failed"], [X, BARRIER, BARRIER, "failed"])
    (finding,) = report.findings(dumps)
    assert finding.startswith("Group '0': collective 2 differs. rank 0: all_reduce sum")
    assert "; rank 1: barrier at " in finding
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(tmp_path), "--last", "1"])
    assert result.exit_code == 1
    assert "collective 2 differs" in result.output
    assert "rank 0 of 2: asked for" in result.output


def test_a_rank_that_stopped_earlier(tmp_path: Path) -> None:
    dumps = dumped(tmp_path, [X, X, "late"], [X, X, "late"], [X])
    (finding,) = report.findings(dumps)
    assert "Group '0': rank 2 never came to collective 2. ranks 0-1: all_reduce" in finding
    assert "The last that rank 2 called: all_reduce sum float32[4] at " in finding


def test_a_collective_that_failed_and_a_rank_without_a_dump(tmp_path: Path) -> None:
    dumped(tmp_path, [X, X, "lost"], [X, X, "lost"], [X])
    (tmp_path / "rank-2.json").unlink()
    gone, failed = report.findings(report.read(tmp_path))
    assert gone.startswith("rank 2 left no dump")
    assert "collective 2 failed. all_reduce sum float32[4] at " in failed
    assert "called by rank 0 first and by rank 1 last, 0.0 s later." in failed


def test_what_was_dropped_is_not_missed(tmp_path: Path) -> None:
    with override(flight_records=2):
        recorder(0, 2, [X, X, X]).dump(tmp_path)
    recorder(1, 2, [BARRIER, X, X]).dump(tmp_path)
    assert report.findings(report.read(tmp_path)) == []


def test_the_latest_run_is_shown_and_old_ones_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with override(flight_dir=tmp_path):
        for number in range(22):
            file = recorder(0, 1, [X], f"{number:032x}").dump()
        assert f"{21:032x}" in str(file)
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [])
    assert result.exit_code == 0, result.output
    assert f"{21:032x}" in result.output
    assert len(list(tmp_path.glob("0*"))) == 20
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "is not a dump"), ("[]", "is not a dump"), (json.dumps({"version": 1}), "rank")],
)
def test_files_that_are_no_dumps(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    with pytest.raises(ValueError, match=problem):
        report.read(tmp_path)
    assert CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(tmp_path)]).exit_code == 2


def test_another_version(tmp_path: Path) -> None:
    file = recorder(0, 1, [X]).dump(tmp_path)
    content: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "version": 9}))
    with pytest.raises(ValueError, match="has version 9; this is for version 1"):
        report.read(tmp_path)


def test_spans() -> None:
    assert report.spans([]) == ""
    assert report.spans([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"

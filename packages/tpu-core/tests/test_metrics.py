"""Counters, snapshots and their difference, events, and the report."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from tpu_core import modes
from tpu_core.errors import RecompilationError
from tpu_core.metrics import COUNTERS, METRICS, CompileEvent, GraphSplit, Metrics, Runs


@pytest.fixture
def metrics():
    return Metrics()


EVENT = CompileEvent(0.5, "mm: (8, 128) -> (8, 131)", ops=57, line="train.py:31", key="abc")


def test_a_new_snapshot_is_zero_and_has_every_documented_key(metrics):
    assert metrics.snapshot() == dict.fromkeys(COUNTERS, 0)
    assert all(text.endswith(".") for text in COUNTERS.values())


def test_everything_is_counted(metrics):
    metrics.compiled(EVENT)
    metrics.compiled(CompileEvent(0.01, "start", source="disk", ops=3))
    metrics.cache_miss()
    assert metrics.fallback("aten.sort.default", "a.py:1", 0.25) is True
    assert metrics.fallback("aten.sort.default", "a.py:2", 0.25) is False
    metrics.host_sync("a.py:3", "item")
    metrics.host_sync("a.py:3", "item")
    metrics.host_sync(None, "print")
    metrics.d2h(7)
    metrics.debug_check()
    assert metrics.graph_split(GraphSplit("aten.sort.default", "no lowering", "a.py:5")) is True
    metrics.padded_execution(4)
    metrics.host_part("a.py:4", 0.25)
    metrics.host_part("a.py:4", 0.5)
    metrics.outline()
    metrics.verification()
    metrics.compiling(2)
    metrics.compiling(-1)
    assert metrics.snapshot() == {
        "compiles": 1,
        "compile_seconds": 0.5,
        "compiles_pending": 1,
        "cache_hits_memory": 0,
        "substitutions": 0,
        "host_ops": 0,
        "promotions": 0,
        "demotions": 0,
        "cache_hits_disk": 1,
        "disk_load_seconds": 0.01,
        "cache_misses": 1,
        "executions": 0,
        "pieces": 0,
        "padded_executions": 1,
        "padding_copies": 4,
        "host_parts": 2,
        "host_part_seconds": 0.75,
        "outlines": 1,
        "verifications": 1,
        "segments": 0,
        "ops": 0,
        "signatures": 0,
        "graph_splits": 1,
        "fallbacks": 2,
        "fallback_seconds": 0.5,
        "host_syncs": 3,
        "h2d_count": 0,
        "h2d_bytes": 0,
        "d2h_count": 1,
        "d2h_bytes": 7,
        "debug_checks": 1,
        "fallback.aten.sort.default": 2,
        "host_sync.item": 2,
        "host_sync.print": 1,
    }
    assert metrics.fallbacks()["aten.sort.default"].line == "a.py:1"
    assert metrics.host_syncs() == {("item", "a.py:3"): 2, ("print", None): 1}
    assert metrics.host_parts()["a.py:4"] == Runs(2, 0.75)
    assert [e.source for e in metrics.compile_events()] == ["compiled", "disk"]


def test_delta_and_reset(metrics):
    metrics.host_sync("a.py:1", "item")
    before = metrics.snapshot()
    metrics.host_sync("a.py:2", "tolist")
    metrics.compiled(EVENT)
    delta = metrics.delta(before)
    assert delta["host_syncs"] == 1
    assert delta["host_sync.item"] == 0
    assert delta["host_sync.tolist"] == 1
    assert delta["compiles"] == 1
    metrics.reset()
    assert metrics.snapshot() == dict.fromkeys(COUNTERS, 0)
    assert metrics.compile_events() == []


def test_counts_of_the_recorder_are_read_from_it(metrics):
    total = {"ops": 40, "executions": 2}
    metrics.set_source(lambda: dict(total))
    assert metrics.snapshot() == dict.fromkeys(COUNTERS, 0)
    total.update(ops=45, executions=3)
    before = metrics.snapshot()
    assert (before["ops"], before["executions"]) == (5, 1)
    total.update(ops=47)
    assert (metrics.delta(before)["ops"], metrics.delta(before)["executions"]) == (2, 0)
    metrics.reset()
    assert metrics.snapshot() == dict.fromkeys(COUNTERS, 0)


def test_no_count_is_lost_between_threads(metrics):
    def work():
        for _ in range(2000):
            metrics.d2h(1)
            metrics.host_sync("a.py:1", "item")
            metrics.fallback("aten.sort.default", None, 0.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = metrics.snapshot()
    assert count["d2h_bytes"] == count["host_syncs"] == count["fallbacks"] == 8000
    assert count["host_sync.item"] == count["fallback.aten.sort.default"] == 8000


def test_one_log_line_a_compile(metrics, caplog):
    with caplog.at_level(logging.DEBUG, logger="tpu_core"):
        metrics.compiled(EVENT)
        metrics.compiled(CompileEvent(0.01, "start", source="disk", ops=3))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "compiled 57 ops in 0.500 s at train.py:31: mm: (8, 128) -> (8, 131)"),
        ("DEBUG", "loaded from disk 3 ops in 0.010 s: start"),
    ]


def test_the_log_level_of_the_configuration(monkeypatch, capsys):
    from tpu_core import logs
    from tpu_core.config import override

    logger = logging.getLogger("tpu_core")
    # As in a program that has set up no logging: pytest's own handlers sit on the root.
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logs, "_handler", None)
    logs.configure()
    assert logger.handlers == []
    with override(log_level="info"):
        logs.configure()
        logs.configure()
    assert logger.level == logging.INFO
    assert len(logger.handlers) == 1
    Metrics().compiled(EVENT)
    assert capsys.readouterr().err.startswith("tpu_core: compiled 57 ops in 0.500 s")


def test_the_process_wide_metrics():
    assert isinstance(METRICS, Metrics)


def test_no_recompile_names_what_is_new():
    x, longer = torch.zeros(3, 11, device="tpu"), torch.zeros(3, 13, device="tpu")
    with torch.tpu.set_eager_mode("strict"):
        x.tan()
        before = METRICS.snapshot()
        with torch.tpu.no_recompile():
            y = x.tan()
            for _ in range(2):  # the reason stays the same until it is compiled
                with pytest.raises(RecompilationError) as caught:
                    longer.tan()
                expected = "aten.tan.default: self float32[3, 11] -> float32[3, 13]"
                assert caught.value.values["reason"] == expected
                assert "test_metrics.py" in caught.value.line
        assert METRICS.delta(before)["compiles"] == 0
        assert torch.equal(y.cpu(), torch.zeros(3, 11))
        assert longer.tan().sum().item() == 0


def test_the_reason_is_against_the_most_similar_form():
    x, y, z = (torch.zeros(n, device="tpu") for n in (19, 1, 23))
    with torch.tpu.set_eager_mode("strict"):
        torch.hypot(x, y)
        torch.hypot(z, z)
        with pytest.raises(RecompilationError) as caught, torch.tpu.no_recompile():
            torch.hypot(z, y)
    expected = "aten.hypot.default: other float32[23] -> float32[1]"
    assert caught.value.values["reason"] == expected


def test_no_recompile_sees_what_was_recorded_inside_it():
    x = torch.zeros(3, 17, device="tpu")
    with modes.using(modes.Mode("whole", max_ops=0)):
        y = x.cosh()  # before the block
        with pytest.raises(RecompilationError), torch.tpu.no_recompile():
            x.sinh()
            z = x.sinh()
        assert y.sum().item() == 51
        assert z.sum().item() == 0  # it stayed recorded, and may be compiled now

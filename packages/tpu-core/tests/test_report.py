"""The report of compiles as text, as rich tables and as a page in a browser."""

from __future__ import annotations

import html
import io
import logging
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tpu_core import _C
from tpu_core.cli.app import app
from tpu_core.metrics import METRICS, CompileEvent, Metrics
from tpu_core.report import build_report

LISTED = (("/home/a/train.py:31 in step", "aten.mm"),) * 2 + (
    ("/home/a/train.py:32 in step", "aten.relu"),
)
EVENT = CompileEvent(
    0.5,
    "aten.mm.default: self float32[8, 128] -> float32[8, 131]",
    ops=3,
    line="/home/a/train.py:31 in step",
    key="abc",
    cut="optimizer step",
    contents=LISTED,
)


@pytest.fixture
def metrics():
    return Metrics()


def test_the_report_as_text_and_as_rich_tables(metrics):
    metrics.compiled(EVENT)
    metrics.compiled(CompileEvent(0.02, "sum: first use, with [4]", source="disk", ops=2))
    metrics.fallback("aten.sort.default", "a.py:1", 0.25)
    metrics.host_sync("a.py:3", "item")
    metrics.d2h(2048)
    text = str(build_report(metrics))
    assert repr(build_report(metrics)) == text
    unpadded = re.sub(" {2,}", "  ", text)  # a column is as wide as its longest row
    for part in (
        "compiles  1 in 0.50 s",
        "fallbacks to the CPU  1 in 0.25 s",
        "device to host  1, 2.00 KiB",
        "aten.mm.default: self float32[8, 128] -> float32[8, 131]",
        "train.py:31",
        "sum: first use, with [4]",
        "aten.sort.default",
        "a.py:3",
    ):
        assert part in unpadded
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(build_report(metrics))
    shown = console.export_text()
    assert "sum: first use, with [4]" in shown  # not taken for markup
    assert "aten.sort.default" in shown


def test_the_report_is_bounded_and_leaves_out_empty_tables(metrics):
    assert "Compiles" not in str(build_report(metrics))
    for i in range(50):
        metrics.compiled(CompileEvent(0.1, f"reason {i}"))
    text = str(build_report(metrics))
    assert "Compiles (latest 20 of 50)" in text
    assert "reason 49" in text
    assert "reason 29" not in text


def test_recompiles_of_one_cause_stand_together(metrics):
    metrics.compiled(CompileEvent(1.0, "aten.cat.default: first use", line="a.py:3"))
    for n in range(5):
        text = f"aten.cat.default: tensors[0] float32[{n}] -> float32[{n + 1}]"
        metrics.compiled(CompileEvent(0.25, text, line="a.py:3"))
    metrics.compiled(CompileEvent(0.5, "aten.mm.default: self [1] -> [2]", line="a.py:4"))
    causes = build_report(metrics).facts.causes
    assert [(c.count, c.seconds, c.line, c.reason) for c in causes] == [
        (5, 1.25, "a.py:3", "aten.cat.default: tensors[0] float32[4] -> float32[5]"),
        (1, 0.5, "a.py:4", "aten.mm.default: self [1] -> [2]"),
    ]


def test_runs_of_each_program_where_they_are_counted(metrics):
    runs = {"abc": (5, 0.25)}
    metrics.compiled(EVENT)
    assert metrics.runs() is None
    assert "in 0.75 s" not in str(build_report(metrics))
    metrics.set_runs(lambda: runs)
    runs = {"abc": (8, 1.0), "other": (1, 0.5)}
    assert "3 in 0.75 s" in str(build_report(metrics))
    assert "750.0 ms" in build_report(metrics).to_html()
    metrics.reset()
    assert metrics.runs()["abc"].count == 0


def test_events_are_bounded_by_the_ops_that_they_list(metrics, monkeypatch):
    from tpu_core import metrics as module

    monkeypatch.setattr(module, "_MOST_OPS", 10)
    for n in range(8):
        metrics.compiled(CompileEvent(0.1, f"reason {n}", contents=LISTED))
    assert [e.reason for e in metrics.compile_events()] == ["reason 5", "reason 6", "reason 7"]
    assert metrics.snapshot()["compiles"] == 8


class Page(HTMLParser):
    """Elements of a page by id: their text, one space between words, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        if tag not in ("meta", "input", "br"):
            self.open.append(found.get("id") or "")
        if found.get("id"):
            self.attributes[found["id"] or ""] = found
            self.texts.setdefault(found["id"] or "", "")

    def handle_endtag(self, tag: str) -> None:
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self.open):
            self.texts[name] = " ".join(f"{self.texts[name]} {data}".split())


def in_browser(page: str, folder: Path, script: str = "") -> Page:
    """What Chromium makes of a page, after ``script`` has run in it."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: see .ci/run"
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    result = subprocess.run(
        [chromium, *options, "--dump-dom", file.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0
    return Page(result.stdout)


@pytest.mark.of_cpu(reason="such machines have no browser")
def test_the_page_in_a_browser(metrics, tmp_path):
    metrics.compiled(
        CompileEvent(
            1.0, "aten.mm.default: first use", ops=3, key="k0", cut="item", contents=LISTED
        )
    )
    metrics.compiled(EVENT)
    metrics.compiled(CompileEvent(0.01, "x: <b> & [4]", source="disk", ops=2, key="k2"))
    metrics.fallback("aten.sort.default", "/home/a/b.py:1 in <module>", 0.25)
    for _ in range(3):
        metrics.host_sync("/home/a/c.py:7 in log", "item")
    saved = build_report(metrics).save_html(tmp_path / "report.html")
    text = saved.read_text()
    assert not re.search(r"https?://|\bsrc=|@import|url\(", text)  # needs no network
    page = in_browser(
        text,
        tmp_path,
        """
        const main = document.querySelector("main");
        main.insertAdjacentHTML("beforeend", "<p id=style>" + getComputedStyle(main).maxWidth);
        document.querySelector(".tools button").click();
        const input = document.querySelector(".tools input");
        input.value = "FLOAT32[8, 131]";
        input.dispatchEvent(new Event("input"));
        """,
    )
    assert page.texts["style"] == "1400px"
    assert "compiles 2 in 1.50 s" in page.texts["totals"]
    assert "1 500.0 ms train.py:31 in step aten.mm.default: self" in page.texts["causes"]
    assert "first use" not in page.texts["causes"]
    second = page.texts["program-2"]
    assert second.startswith("2 XLA 500.0 ms 3 optimizer step train.py:31 in step aten.mm.default")
    assert "train.py:31 in step mm x2 train.py:32 in step relu" in second
    assert "cache folder 10.0 ms 2 x: <b> & [4]" in page.texts["program-3"]
    assert "b" not in page.tags  # text of the program is no markup
    assert "aten.sort.default 1 250.0 ms b.py:1 in <module>" in page.texts["fallbacks"]
    assert "3 item c.py:7 in log" in page.texts["host-syncs"]
    assert page.tags.count("rect") == 3
    # The script: all are open, and the filter leaves one.
    assert all("open" in page.attributes[f"program-{i}"] for i in (1, 2, 3))
    assert ["hidden" in page.attributes[f"program-{i}"] for i in (1, 2, 3)] == [True, False, True]


@pytest.mark.of_cpu(reason="such machines have no browser")
def test_host_time_tiers_and_axis(metrics, monkeypatch, tmp_path):
    from tpu_core.report import page as module
    from tpu_core.report.page import Tick, ticks

    counts = dict.fromkeys(("host_ops", "promotions", "demotions", "ops"), 0)
    runs = {"abc": (0, 0.0)}
    metrics.set_source(lambda: dict(counts))
    metrics.set_runs(lambda: runs)
    counts |= {"host_ops": 300, "promotions": 2, "demotions": 1, "ops": 100}
    runs["abc"] = (4, 0.25)
    metrics.compiled(EVENT)
    metrics.compiled(CompileEvent(0.25, "x", source="disk", key="k2", ops=9))
    metrics.compiled(CompileEvent(9.0, "x", source="background", key="k3"))
    page = in_browser(
        build_report(metrics).to_html(),
        tmp_path,
        """
        const [kind, order] = document.querySelectorAll(".tools select");
        kind.value = "disk";
        kind.dispatchEvent(new Event("change"));
        order.value = "seconds";
        order.dispatchEvent(new Event("change"));
        const ids = [...document.querySelectorAll(".program")].map((p) => p.id);
        const shown = document.querySelector(".tools output").textContent;
        const found = `<p id=found>${shown}: ${ids}`;
        document.querySelector("main").insertAdjacentHTML("beforeend", found);
        """,
    )
    # Nothing waits for what is compiled in the background.
    host = page.texts["host-time"]
    assert host.index("compiling 500.0 ms 50%") < host.index("loading programs 250.0 ms 25%")
    assert "starting programs 250.0 ms 25%" in host
    assert "CPU kernels 300 75% run at once programs 100 25% 2 segments went" in page.texts["tiers"]
    assert page.texts["found"] == "1 of 3 programs: program-3,program-1,program-2"
    # The last mark of the axis is at its end, or shortly before.
    marks = [Tick(0.0, "0"), Tick(0.9, "90 min"), Tick(1.0, "100 min")]
    monkeypatch.setattr(module, "ticks", lambda span: marks)
    # A frame, as Chromium's windows are wider than a phone.
    frame = f'<iframe width=380 srcdoc="{html.escape(build_report(metrics).to_html())}"></iframe>'
    phone = in_browser(
        f"<body>{frame}</body>",
        tmp_path,
        """
        onload = () => {
            const inside = document.querySelector("iframe").contentDocument.documentElement;
            const beyond = inside.scrollWidth - inside.clientWidth;
            document.body.innerHTML = `<p id=beyond>${beyond}</p>`;
        };
        """,
    )
    assert int(phone.texts["beyond"]) == 0
    for span in (0.0012, 0.4, 1.0, 7.5, 59.0, 600.0, 90_000.0):
        marks = ticks(span)
        assert 2 <= len(marks) <= 6 and marks[0].text == "0", marks
        assert all(0 <= mark.place <= 1 for mark in marks)
    assert [mark.text for mark in ticks(7.5)] == ["0", "2 s", "4 s", "6 s"]


@pytest.mark.of_cpu(reason="such machines have no browser")
def test_a_page_of_many_programs_and_of_none(metrics, monkeypatch, tmp_path):
    from tpu_core.report import page as module

    assert (
        "No program was made."
        in in_browser(build_report(metrics).to_html(), tmp_path).texts["programs"]
    )
    monkeypatch.setattr(module, "_MOST_PROGRAMS", 3)
    monkeypatch.setattr(module, "_MOST_LINES", 3)
    for n in range(5):
        metrics.compiled(CompileEvent(0.1, f"reason {n}", contents=LISTED, ops=3))
    page = Page(build_report(metrics).to_html())
    assert "The latest 3 are shown, 2 older ones are not." in page.texts["programs"]
    assert [name for name in page.texts if name.startswith("program-")] == [
        "program-3",
        "program-4",
        "program-5",
    ]
    assert "train.py:32 in step" in page.texts["program-5"]
    assert "train.py:32 in step" not in page.texts["program-3"]


def test_in_a_notebook_it_is_part_of_a_page(metrics):
    metrics.compiled(EVENT)
    shown = build_report(metrics)._repr_html_()
    assert "<html" not in shown and "<body" not in shown
    # Every rule of its style is for the report alone.
    style = re.search(r"<style>(.*?)</style>", shown, re.DOTALL)[1]
    selectors = re.findall(r"^\s*([^@{};]+)\{", style, re.MULTILINE)
    assert selectors
    assert all(".tpu-report" in s for s in selectors)


def test_each_compile_and_load_of_a_program_is_logged_and_shown(caplog):
    METRICS.reset()
    with caplog.at_level(logging.DEBUG, logger="tpu_core"), torch.tpu.set_eager_mode("strict"):
        for n in (41, 42):
            torch.zeros(2, n, device="tpu").tan()
        _C.clear_programs()
        torch.zeros(2, 41, device="tpu").tan()
    form = r"{} 1 ops in \d+\.\d+ s at .*test_report\.py:\d+ in {}: {}"
    name = "test_each_compile_and_load_of_a_program_is_logged_and_shown"
    for level, verb, reason in (
        ("INFO", "compiled", "aten.tan.default: self float32[2, 41] -> float32[2, 42]"),
        ("DEBUG", "loaded from disk", "the same program again, which is not in memory any more"),
    ):
        line = form.format(verb, name, re.escape(reason))
        found = [r for r in caplog.records if re.fullmatch(line, r.getMessage())]
        assert {r.levelname for r in found} == {level}
    page = Page(torch.tpu.compile_report().to_html())
    shown = [text for name, text in page.texts.items() if name.startswith("program-")]
    assert any(" XLA " in text and "float32[2, 42]" in text for text in shown)
    assert any(" cache folder " in text and "the same program again" in text for text in shown)


def test_the_report_of_a_script_by_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "print(sys.argv[1:], torch.full((2, 43), 3.0, device='tpu').sum().item())\n"
        "sys.exit(3)\n"
    )
    file = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", "--html", str(file), str(script), "--html", "x"])
    assert result.exit_code == 3
    assert result.stdout == "['--html', 'x'] 258.0\n"
    assert str(file) in result.stderr
    programs = Page(file.read_text()).texts["programs"]
    assert "script.py:2 in <module>" in programs and "float32[2, 43]" in programs
    assert "Totals" in CliRunner().invoke(app, ["report", str(script)]).stderr

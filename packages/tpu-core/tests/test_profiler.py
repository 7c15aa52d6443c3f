"""Rows of the device in torch.profiler, and the files of torch.tpu.profiler."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from interpreter import run
from tpu_core import _C, modes
from tpu_core.pjrt import profiling
from tpu_core.profiler import xplane
from tpu_core.profiler.rows import Kind, Row, op_name, short_name

pytestmark = pytest.mark.of_cpu(reason="PyTorch's profiler holds CUPTI, which XLA's would need")
HERE = Path(__file__).name
BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


@pytest.fixture(autouse=True)
def started() -> Iterator[None]:
    torch.zeros(1, device="tpu").sum().item()
    yield
    _C.flush()


def step(x: torch.Tensor) -> float:
    y = torch.relu(x @ x)
    return (y * 0.5).sum().item()


def profiled(work: Callable[[], object], **options: Any) -> profile:
    with profile(activities=BOTH, **options) as taken:
        work()
    return taken


def device_rows(taken: profile) -> list[Any]:
    """Rows that count as time of the device: ops and transfers."""
    return [
        e
        for e in taken.events()
        if e.device_type == DeviceType.PrivateUse1 and not e.is_user_annotation
    ]


def ops(taken: profile) -> set[str]:
    return {e.name.split(" ")[0] for e in device_rows(taken) if e.name.startswith("aten::")}


def chrome(taken: profile, folder: Path) -> list[dict[str, Any]]:
    file = folder / "trace.json"
    taken.export_chrome_trace(str(file))
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(
        outer["ts"] <= inner["ts"] + 0.01  # times are rounded to nanoseconds
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01
    )


def test_a_program_has_a_row_with_its_ops_inside_named_by_op_and_line(tmp_path: Path) -> None:
    x = torch.randn(64, 64, device="tpu")
    with modes.using("segments"):
        step(x)
        events = chrome(profiled(lambda: step(x)), tmp_path)
    (program,) = [e for e in events if e.get("cat") == "gpu_user_annotation"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert program["name"].startswith("program of 4 ops (" + HERE)
    assert {"aten::mm", "aten::sum"} <= {e["args"]["op"] for e in kernels}
    assert all(f"({HERE}:" in e["name"] for e in kernels)
    assert all(e["args"]["line"].endswith(" in step") for e in kernels)
    assert all(inside(e, program) for e in kernels)
    fused = [e["args"].get("fused", "") for e in kernels]
    assert any("aten::mul" in names for names in fused), kernels
    # One arrow from each aten row to the first row of the device that came of it, one from the
    # launch to the program.
    starts = {e["id"]: e for e in events if e.get("cat") == "ac2g" and e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e.get("cat") == "ac2g" and e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) >= 3
    rows = [e for e in events if e.get("cat") == "cpu_op"]
    (mm,) = [e for e in rows if e["name"] == "aten::mm"]
    (kernel,) = [e for e in kernels if e["args"]["op"] == "aten::mm"]
    assert kernel["args"]["External id"] == mm["args"]["External id"]
    assert any(
        abs(start["ts"] - mm["ts"]) < 0.01 and abs(ends[i]["ts"] - kernel["ts"]) < 0.01
        for i, start in starts.items()
    )
    assert {e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] == 0} == {
        "tpu:0"
    }


def test_device_time_is_summed_by_aten_op() -> None:
    x = torch.randn(64, 64, device="tpu")
    with modes.using("segments"):
        step(x)
        taken = profiled(lambda: [step(x) for _ in range(3)])
    averages = {(a.key, a.device_type): a for a in taken.key_averages()}
    mm = averages["aten::mm", DeviceType.CPU]
    assert mm.count == 3
    rows = [e for e in device_rows(taken) if e.name.startswith("aten::mm")]
    assert len(rows) == 3
    total = sum(e.time_range.elapsed_us() for e in rows)
    assert mm.self_device_time_total == pytest.approx(total)


def test_cpu_kernels_have_rows_of_the_device(host: None, tmp_path: Path) -> None:
    x = torch.randn(64, 64, device="tpu")
    taken = profiled(lambda: step(x))
    events = chrome(taken, tmp_path)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    # PyTorch's own row of the kernel would count the op twice.
    assert [a.count for a in taken.key_averages() if a.key == "aten::mm"] == [1]
    assert [e["args"]["op"] for e in kernels] == [
        "aten::mm",
        "aten::relu",
        "aten::mul",
        "aten::sum",
    ]
    assert all(f"({HERE}:" in e["name"] for e in kernels)
    by_id = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    for e in kernels:
        assert by_id[e["args"]["External id"]]["name"] == e["args"]["op"]


def test_ops_of_a_backward_carry_the_line_of_their_forward(tmp_path: Path) -> None:
    x = torch.randn(64, 64, device="tpu", requires_grad=True)

    def train() -> None:
        (x @ x).sum().backward()
        torch.tpu.synchronize()

    with modes.using("segments"):
        train()
        rows = device_rows(profiled(train))
    assert Counter(e.name.split(" ")[0] for e in rows)["aten::mm"] >= 3
    assert all(f"({HERE}:" in e.name for e in rows if e.name.startswith("aten::mm"))


def test_single_ops_are_programs_in_strict() -> None:
    x = torch.randn(64, 64, device="tpu")
    with modes.using(modes.Mode("strict", max_ops=1)):
        step(x)
        taken = profiled(lambda: step(x))
    assert {"aten::mm", "aten::relu", "aten::mul", "aten::sum"} <= ops(taken)
    programs = [e for e in taken.events() if e.name.startswith("program of 1 op (")]
    assert len(programs) == 4


def test_a_program_of_other_lines_shows_the_lines_of_this_run() -> None:
    x = torch.randn(48, 48, device="tpu")

    def here() -> None:
        (x @ x).sin().sum().item()

    def there() -> None:
        (x @ x).sin().sum().item()

    with modes.using("segments"):
        here()
        compiles = torch.tpu.metrics()["compiles"]
        taken = profiled(there)
        assert torch.tpu.metrics()["compiles"] == compiles
    line = there.__code__.co_firstlineno + 1
    named = [e.name for e in device_rows(taken) if e.name.startswith("aten::")]
    assert named and all(name.endswith(f"({HERE}:{line})") for name in named)


def test_compiles_and_transfers_have_rows(tmp_path: Path) -> None:
    def work() -> None:
        x = torch.ones(7, 13).to("tpu")
        (x.tanh() + 1).cpu()

    with modes.using("segments"):
        events = chrome(profiled(work), tmp_path)
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    assert {"Memcpy HtoD", "Memcpy DtoH"} == {e["name"] for e in copies}
    assert all(e["args"]["bytes"] == str(7 * 13 * 4) for e in copies)
    made = [e for e in events if e["name"] in ("tpu::compile", "tpu::load")]
    assert len(made) == 1 and HERE in made[0]["args"]["line"]


def test_memory_is_reported(host: None) -> None:
    def work() -> None:
        x = torch.ones(1000, device="tpu")
        y = x + 1
        del x, y

    taken = profiled(work, profile_memory=True)
    averages = {a.key: a for a in taken.key_averages()}
    assert averages["aten::add"].self_device_memory_usage == 4000


def test_a_schedule_gives_a_profile_a_cycle() -> None:
    x = torch.randn(64, 64, device="tpu")
    found: list[Counter[str]] = []

    def ready(taken: profile) -> None:
        found.append(Counter(e.name.split(" ")[0] for e in device_rows(taken)))

    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(activities=BOTH, schedule=plan, on_trace_ready=ready) as taken:
        for _ in range(8):
            step(x)
            taken.step()
    assert [counts["aten::mm"] for counts in found] == [2, 2]


def test_an_exception_ends_the_profile_and_the_next_is_whole() -> None:
    x = torch.randn(64, 64, device="tpu")

    def failing() -> None:
        step(x)
        raise ValueError("of the user's")

    with pytest.raises(ValueError), profile(activities=BOTH) as taken:
        failing()
    assert "aten::mm" in ops(taken)
    counts = Counter(e.name.split(" ")[0] for e in device_rows(profiled(lambda: step(x))))
    assert counts["aten::mm"] == 1


def test_a_profile_in_a_thread() -> None:
    x = torch.randn(64, 64, device="tpu")
    found: list[set[str]] = []
    thread = threading.Thread(target=lambda: found.append(ops(profiled(lambda: step(x)))))
    thread.start()
    thread.join()
    assert "aten::mm" in found[0]


def test_user_annotations_are_there() -> None:
    x = torch.randn(64, 64, device="tpu")

    def work() -> None:
        with record_function("part one"):
            step(x)

    assert "part one" in {a.key for a in profiled(work).key_averages()}


def test_the_cpu_alone_records_nothing_of_the_device() -> None:
    x = torch.randn(64, 64, device="tpu")
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        step(x)
    assert device_rows(taken) == []
    assert "aten::mm" in {a.key for a in taken.key_averages()}
    assert _C.take_profile() == {"host_ops": [], "launches": [], "transfers": []}


def test_a_profile_starts_no_device_and_shows_one_that_starts_in_it() -> None:
    result = run("""
        import torch
        from torch.profiler import profile
        with profile() as taken:
            torch.ones(2) + 1
        print(torch.tpu.is_initialized())
        with profile() as taken:
            x = torch.ones(8, 8, device="tpu")
            (x @ x).sum().item()
        print(any(e.name.startswith("aten::mm (") for e in taken.events()))
    """)
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if "USDT" not in line] == ["False", "True"]


def test_without_the_trace_of_xla_the_other_rows_are_there(tmp_path: Path) -> None:
    x = torch.randn(64, 64, device="tpu")
    with modes.using("segments"), jax.profiler.trace(str(tmp_path)):
        step(x)
        with pytest.warns(UserWarning, match="has no rows of XLA ops"):
            taken = profiled(lambda: step(x))
    assert {e.name for e in device_rows(taken)} == {"Memcpy DtoH"}
    assert "tpu::launch" in {e.name for e in taken.events()}


def test_ranges_under_the_names_of_cudas_nvtx(tmp_path: Path) -> None:
    nvtx = torch.tpu.nvtx
    x = torch.randn(8, 8, device="tpu")

    @nvtx.range("layer {}", 3)
    def layer() -> None:
        assert (nvtx.range_push("outer"), nvtx.range_push("inner")) == (0 + 1, 1 + 1)
        started = nvtx.range_start("overlapping")
        (x @ x).sum().item()
        nvtx.mark("here")
        assert nvtx.range_pop() == 2
        nvtx.range_end(started)
        assert nvtx.range_pop() == 1

    layer()  # without a profile
    names = {"layer 3", "outer", "inner", "overlapping", "here"}
    taken = profiled(layer)
    rows = {e.name: e for e in taken.events() if e.name in names}
    assert rows.keys() == names
    inner, outer, mark = (rows[name].time_range for name in ("inner", "outer", "here"))
    assert outer.start <= inner.start <= mark.start and inner.end <= outer.end
    with torch.tpu.profiler.trace(tmp_path) as trace:
        layer()
    data = jax.profiler.ProfileData.from_file(str(trace.xplane))
    host = {e.name for p in data.planes if p.name == "/host:CPU" for n in p.lines for e in n.events}
    assert names <= host
    with pytest.raises(RuntimeError, match="without a range_push"):
        nvtx.range_pop()
    with pytest.raises(RuntimeError, match="handle 0 is open"):
        nvtx.range_end(0)


def test_files_for_xprof_and_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64, 64, device="tpu")
    with modes.using("segments"), torch.tpu.profiler.trace(tmp_path) as taken:
        for i in range(2):
            with torch.tpu.profiler.step(i), torch.tpu.profiler.annotate("forward"):
                step(x)
    printed = capsys.readouterr().out
    assert f"xprof --logdir {tmp_path}" in printed and str(taken.perfetto) in printed
    assert "aten::mm" in ops(taken.profile)
    events = json.loads(gzip.decompress(taken.perfetto.read_bytes()))["traceEvents"]
    assert {"forward", "train 0", "train 1"} <= {e["name"] for e in events}
    assert taken.xplane.parent.parent == tmp_path / "plugins" / "profile"
    data = jax.profiler.ProfileData.from_file(str(taken.xplane))
    planes = {plane.name: plane for plane in data.planes}
    lines = {
        line.name: [event.name for event in line.events]
        for line in planes["/device:CUSTOM:tpu:0"].lines
    }
    assert len(lines["Programs"]) == 2
    # A line for each thread of XLA's, and two runs may have two threads.
    instructions = [name for line in lines if line.startswith("XLA ops") for name in lines[line]]
    assert sum(name.startswith("aten::mm (") for name in instructions) == 2
    host = [e.name for line in planes["/host:CPU"].lines for e in line.events]
    assert host.count("forward") == 2 and host.count("train") == 2
    # The rows lie where XLA's own events of the same instructions do.
    own = [
        e.start_ns
        for line in planes["/host:CPU"].lines
        for e in line.events
        if "hlo_op" in dict(e.stats)
    ]
    rows = [
        e.start_ns
        for l in planes["/device:CUSTOM:tpu:0"].lines
        if "XLA" in l.name
        for e in l.events
    ]
    assert sorted(own) == sorted(rows)


def test_files_are_written_where_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError), torch.tpu.profiler.trace(tmp_path) as taken:
        raise ValueError("of the user's")
    assert taken.xplane.exists() and taken.perfetto.exists()


RANK = """
import sys
import torch
import torch.distributed as dist

rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
with torch.tpu.profiler.trace(f"{folder}/profiles"):
    torch.ones(2, device="tpu").sum().item()
"""


def test_ranks_that_no_launcher_numbers_write_files_of_their_own(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [f"Profile of rank {i} in" in text for i, text in enumerate(printed)] == [True, True]
    (run,) = (tmp_path / "profiles" / "plugins" / "profile").iterdir()
    for rank in range(2):
        assert len(list(run.glob(f"*.rank{rank}.xplane.pb"))) == 1
        assert len(list(run.glob(f"*.rank{rank}.perfetto.json.gz"))) == 1


def test_tools_of_xprof_say_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No profile"):
        torch.tpu.profiler.tool(tmp_path, "roofline_model")
    with torch.tpu.profiler.trace(tmp_path):
        torch.ones(2, device="tpu").sum().item()
    try:
        import xprof  # noqa: F401
    except ImportError:
        with pytest.raises(ModuleNotFoundError, match="pip install xprof"):
            torch.tpu.profiler.tool_names(tmp_path)
    else:
        assert "roofline_model" in torch.tpu.profiler.tool_names(tmp_path)


def test_a_trace_of_a_tpu_has_programs_and_instructions_on_lines_of_their_own() -> None:
    def row(track: int, name: str, start: int, end: int, **stats: int) -> Row:
        return Row(Kind.OP, name, start, end, 0, track, metadata=stats)

    rows = [
        row(0, "jit_run(17)", 100, 200, run_id=5),
        row(0, "jit_run(17)", 300, 400, run_id=6),
        row(1, "%fusion.3 = f32[8]{0} fusion(%a)", 110, 150),
        row(1, "%copy = f32[8]{0} copy(%b)", 310, 320),
        row(1, "%copy = f32[8]{0} copy(%b)", 250, 260),  # of no program
    ]
    tracks = {0: "XLA Modules", 1: "XLA Ops"}
    trace = profiling.read(xplane.plane("/device:TPU:3", rows, tracks, 0))
    found = [(e.op, e.program, e.run, e.device, e.start, e.end) for e in trace.ops]
    assert found == [("fusion.3", 17, 5, 3, 110, 150), ("copy", 17, 6, 3, 310, 320)]


def test_names_are_those_of_the_op_and_the_users_line() -> None:
    assert short_name("aten.add.Tensor") == short_name("aten::add.Tensor") == "aten::add"
    assert op_name("aten::add", "project/train.py:31 in step") == "aten::add (train.py:31)"
    assert op_name("aten::add", "") == "aten::add"
    quoted = Row(Kind.OP, 'a "b"', 0, 1, 0, 0, metadata={"line": "c\\d"}).native()
    assert json.loads(f'["{quoted[1]}", "{quoted[-1][0][1]}"]') == ['a "b"', "c\\d"]

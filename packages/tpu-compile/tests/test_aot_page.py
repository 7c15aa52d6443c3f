"""The page of a plan: what stands on it, and that it fits a phone."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tpu_compile.aot.costs import Collective, Cost, Roofline
from tpu_compile.aot.page import modules, render, usage
from tpu_compile.aot.plan import Input, KernelUse, Memory, Plan, Temporary

GIB = 2**30
SHAPES = {
    "embedding.weight": (32000, 2048),
    "blocks.*.up.weight": (24, 8192, 2048),
    "blocks.*.down.weight": (24, 2048, 8192),
    "blocks.*.norm.weight": (24, 2048),
    "scale": (1,),
}
ADVICE = tuple(f"Advice number {n} with <a tag>." for n in range(1, 5))


def _input(name: str, kind: str, shape: tuple[int, ...]) -> Input:
    size = 4 * math.prod(shape)
    return Input(name, kind, shape, "float32", (), size, size)


def _plan(topology: str, fits: bool) -> Plan:
    inputs = [_input(name, "parameter", shape) for name, shape in SHAPES.items()]
    inputs += [_input(f"{n}.exp_avg", "optimizer state", s) for n, s in SHAPES.items()]
    inputs.append(_input("batch.0", "batch", (16, 1024)))
    arguments = sum(i.padded_bytes for i in inputs)
    total = arguments + 3 * GIB
    parts = (arguments, arguments, arguments - 64, 3 * GIB, 1 << 20) if fits else (None,) * 5
    memory = Memory(
        95 * GIB if fits else GIB, total, *parts, largest=(Temporary("int64[8, 4]", GIB, "head"),)
    )
    collectives = (Collective("all-reduce", 4, 52, 3 * GIB, 4.5 * GIB, "blocks.*.down"),)
    cost = Cost(1e14, 1e14, 2e14, 0.9, 3e11, 2e11, collectives, ()) if fits else None
    return Plan(
        program="training step",
        model="GPT",
        topology=topology,
        mesh={"data": 4, "model": 2},
        devices=8,
        inputs=tuple(inputs),
        outputs=("loss",),
        memory=memory,
        cost=cost,
        roofline=Roofline(0.24, 0.3, 0.05) if fits else None,
        model_flops=4e14,
        mfu=0.38 if fits else None,
        kernels=(KernelUse("attention", "splash", 24, ""),),
        scanned=(("blocks", 24),),
        notes=("24 layers of blocks are one loop.",),
        advice=ADVICE,
        seconds={"tracing": 3.2},
        platform_version="libtpu",
    )


FITS, TOO_LARGE = _plan("v5p:2x2x1", True), _plan("v5e:2x2", False)


def test_memory_by_module():
    rows = modules(FITS)
    assert [row.name for row in rows] == [
        *("blocks.*.up", "blocks.*.down", "embedding", "blocks.*.norm", "the model itself")
    ]
    assert rows[0].kinds == dict.fromkeys(("parameter", "optimizer state"), 4 * 24 * 8192 * 2048)
    assert sum(row.bytes for row in rows) == sum(
        i.padded_bytes for i in FITS.inputs if i.kind != "batch"
    )


@pytest.mark.parametrize("plan", [FITS, TOO_LARGE], ids=["fits", "too large"])
def test_kinds_add_up_to_the_total(plan: Plan):
    memory = plan.memory
    known = memory.total + (memory.code or 0)  # the total of these plans leaves the code out
    assert abs(sum(size for _, size in usage(plan)) - known) <= 64


def test_the_page_begins_with_what_matters():
    page = render([FITS, TOO_LARGE])
    assert not re.search(r"https?://|\bsrc=|@import|url\(", page)  # needs no network
    text = " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())
    for expected in (
        "Sweep topology mesh",
        "Memory Fits",
        "Least time of a step 300 ms MFU at most 38.0%",
        "Bound by memory compute 240 ms memory 300 ms communication 50 ms",
        "Memory Does not fit",
        "all-reduce 4 52 3.00 GiB blocks.*.down",
        "int64[8, 4] 1.00 GiB temporary of head",
        "Advice number 1 with &lt;a tag&gt;.",
    ):
        assert expected in text, expected
    # Three of them on top, the others below the tables.
    first, _, later = text.partition("More advice")
    assert first.count("Advice number") == 3 and "Advice number 4" in later
    assert first.index("Advice number 3") < first.index("HBM of one device")


def test_the_page_fits_a_phone(tmp_path: Path):
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: see .ci/run"
    # A frame, as Chromium's windows are wider than a phone.
    frame = f'<iframe width=380 srcdoc="{html.escape(render([FITS, TOO_LARGE]))}"></iframe>'
    script = """
        onload = () => {
            const inside = document.querySelector("iframe").contentDocument.documentElement;
            document.body.innerHTML = `<p>width ${inside.scrollWidth}`;
        };
    """
    file = tmp_path / "plan.html"
    file.write_text(f"<body>{frame}<script>{script}</script></body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu"]
    result = subprocess.run(
        [chromium, *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", file.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=120,
    )
    found = re.search(r"<p>width (\d+)", result.stdout)
    assert found and int(found[1]) <= 380

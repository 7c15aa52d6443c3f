"""``tpu cache warm``: what it runs, what it keeps, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
import torch
from typer.testing import CliRunner

from interpreter import clean
from tpu_core.cache import Entry, ExecutableStore, SharedTier, TieredStore
from tpu_core.cli.app import app
from tpu_core.cli.common_ops import common_calls

SCRIPT = """
import sys
import torch
from sibling import SIZE

print(__name__, sys.argv[1:], flush=True)
x = torch.ones(4, SIZE, device="tpu")
w = torch.nn.Parameter(torch.ones(SIZE, 2, device="tpu"))
optimizer = torch.optim.SGD([w], lr=0.5)
compiles = 0
for step in range(int(sys.argv[2])):
    (x @ w).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    compiles += torch.tpu.metrics()["compiles"]
    torch.tpu.reset_metrics()
    print("step", step, flush=True)
print("end", w.tolist()[0], compiles)
"""


def warm(*arguments, **environment):
    # The command chooses the tiers; the tests' own are for programs alone.
    inherited = {key: value for key, value in os.environ.items() if key != "TPU_TIERS"}
    return subprocess.run(
        [sys.executable, "-m", "tpu_core", "cache", "warm", *map(str, arguments)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def in_process(tmp_path):
    """Run the command on a script that does not use the device."""

    def run(code, *options):
        (tmp_path / "script.py").write_text(code)
        arguments = ["cache", "warm", *options, str(tmp_path / "script.py"), "--flag", "value"]
        return CliRunner().invoke(app, arguments)

    return run


def test_a_script_that_was_run_ahead_of_time_compiles_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "sibling.py").write_text("SIZE = 3\n")
    folder = {"TPU_CACHE_DIR": str(tmp_path / "cache")}
    result = warm("--steps", 3, script, "--epochs", 9, **folder)
    assert result.returncode == 0, result.stderr
    # The script's own output, up to the optimizer's third step.
    assert result.stdout == "__main__ ['--epochs', '9']\nstep 0\nstep 1\n"
    assert "│ compiled " in result.stderr
    entries = len(list((tmp_path / "cache").glob("*/*.tpux")))
    assert entries > 1
    # One entry lists the overloads to register.
    assert f"{entries - 1} of {entries - 1} programs are in {tmp_path / 'cache'}" in result.stderr
    code = f"""
    import runpy, sys
    sys.argv, sys.path[0] = ["train.py", "--epochs", "4"], {str(tmp_path)!r}
    runpy.run_path({str(script)!r}, run_name="__main__")
    """
    assert clean(code, **folder).splitlines()[-1] == "end [-7.0, -7.0] 0"


def test_common_ops_are_ready_in_strict_mode(tmp_path):
    folder = {"TPU_CACHE_DIR": str(tmp_path / "cache")}
    result = warm("--ops", "--shape", "3x5", "--dtype", "float32", **folder)
    assert result.returncode == 0, result.stderr
    code = """
    import torch
    torch.tpu.eager_mode = "strict"
    x = torch.arange(15.0).reshape(3, 5)
    w = torch.eye(5)
    for op in (lambda x, w: torch.softmax(x + 2, -1), torch.mm, lambda x, w: (x * 3).sum()):
        assert torch.allclose(op(x.to("tpu"), w.to("tpu")).cpu(), op(x, w)), op
    print(torch.tpu.metrics()["compiles"], torch.tpu.metrics()["cache_hits_disk"])
    """
    assert clean(code, **folder) == "0 5\n"


def test_each_common_op_takes_the_shapes_and_dtypes_it_is_given():
    calls = list(common_calls(((), (2,), (2, 3), (2, 3, 3)), (torch.float32, torch.int64)))
    names = {(c.name, c.dtype) for c in calls}
    assert ("bmm", torch.float32) in names and ("bmm", torch.int64) not in names
    assert len({str(c) for c in calls}) == len(calls)
    with torch.tpu.set_eager_mode("segments"), torch.no_grad():  # recorded, and few programs
        for call in calls:
            result = call.run()
            assert result.device.type == "tpu", call


ENDS = {
    "pass": 0,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('why')": 1,
    "raise KeyboardInterrupt": 130,
    "import sys; assert sys.argv[1:] == ['--flag', 'value']": 0,
}


@pytest.mark.parametrize("code, expected", ENDS.items())
def test_the_exit_code_is_the_scripts(code, expected, in_process):
    argv, path = list(sys.argv), list(sys.path)
    result = in_process(code)
    assert result.exit_code == expected
    assert ("why" in result.stderr) == ("why" in code)
    assert (sys.argv, sys.path) == (argv, path)


def test_an_error_of_the_script_is_shown_from_its_own_first_line(in_process):
    result = in_process("def f():\n    raise ValueError('mine')\nf()")
    assert result.exit_code == 1
    frames = [line for line in result.stderr.splitlines() if line.startswith("  File ")]
    assert [frame.rsplit(",", 2)[1:] for frame in frames] == [
        [" line 3", " in <module>"],
        [" line 2", " in f"],
    ]
    assert "ValueError: mine" in result.stderr


def test_a_script_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["cache", "warm", str(tmp_path / "none.py")])
    assert result.exit_code == 1
    assert "none.py" in result.stderr


def test_a_module_is_run_by_name(tmp_path, monkeypatch):
    (tmp_path / "package_to_warm").mkdir()
    (tmp_path / "package_to_warm" / "__main__.py").write_text(
        "import sys; print(__name__, sys.argv[1:]); sys.exit(5)"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["cache", "warm", "-m", "package_to_warm", "-x"])
    assert (result.exit_code, result.stdout) == (5, "__main__ ['-x']\n")


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--ops", "script.py"],
        ["--ops", "--steps", "3"],
        ["--steps", "0", "script.py"],
        ["--shape", "3", "script.py"],
        ["--ops", "--shape", "3x"],
        ["--ops", "--shape", "0"],
        ["--ops", "--dtype", "float"[:-1]],
        ["--ops", "--dtype", "complex64"],
    ],
    ids=" ".join,
)
def test_what_does_not_fit_together_is_refused(options):
    assert CliRunner().invoke(app, ["cache", "warm", *options]).exit_code == 2


def test_nothing_is_promised_where_the_cache_is_off(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch; (torch.ones(2, device='tpu') + 1).cpu()")
    result = warm(script, TPU_CACHE="off")
    assert result.returncode == 1
    assert "Nothing was kept: TPU_CACHE=off." in result.stderr


def test_what_only_the_disk_has_is_published(tmp_path):
    url = f"memory://{uuid.uuid4()}"
    disk = ExecutableStore(tmp_path / "disk", 1 << 20)
    for key in "ab":
        disk.put(key, key.encode(), {})
    store = TieredStore(disk, SharedTier(url, 30))
    store.put("b", b"b", {})
    assert store.shared.flush()
    assert store.publish(["a", "b", "not there"]) == 1
    assert store.shared.flush()
    assert store.publish(["a", "b"]) == 0
    assert SharedTier(url, 30).get("a") == Entry({}, b"a")

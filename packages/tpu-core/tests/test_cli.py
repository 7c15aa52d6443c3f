"""The command ``tpu``: doctor, ops, cache, plug-ins, and ``python -m tpu_core``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from interpreter import path_with
from tpu_core import config as config_module
from tpu_core import platforms
from tpu_core.cache import ExecutableStore
from tpu_core.cli import app as app_module
from tpu_core.cli import checks
from tpu_core.cli.app import app
from tpu_core.cli.cache import parse_age
from tpu_core.cli.checks import Check, satisfies
from tpu_core.cli.ops import missing_ops, registered_ops
from tpu_core.cpp_extension import CORE


@pytest.fixture
def tpu(tmp_path, monkeypatch):
    """Run the command with a cache folder of its own: ``tpu("cache", "ls", TPU_CACHE="off")``."""
    monkeypatch.setenv("TPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    # They take seconds, and have tests of their own (test_known_faults.py).
    monkeypatch.setattr(checks, "check_known_faults", lambda: iter(()))

    def run(*arguments, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        config_module._base = None
        return CliRunner().invoke(app, list(arguments))

    yield run
    monkeypatch.undo()
    config_module._base = None


def found(iterator, name):
    return next(check for check in iterator if check.name == name)


def test_help_and_version(tpu):
    help_text = tpu("--help").output
    for command in ("doctor", "ops", "cache"):
        assert command in help_text
    assert re.fullmatch(r"tpu-core \d+\.\d+\.\d+\S*\n", tpu("--version").output)


def test_doctor_shows_versions_platform_and_cache(tpu, tmp_path):
    result = tpu("doctor", TPU_PLATFORM="cpu", TPU_NUM_DEVICES="4")
    for name in ("torch", "jax", "jaxlib", "numpy"):
        assert re.search(rf"{name} +{re.escape(metadata.version(name))}", result.output), name
    assert re.search(r"ok +platform +cpu \(TPU_PLATFORM=cpu\)", result.output)
    assert re.search(r"ok +devices +4", result.output)
    assert re.search(r"ok +TPU_NUM_DEVICES +4", result.output)
    assert f"{tmp_path / 'cache'} (writable)" in result.output
    assert re.search(r"0 entries, 0 B of 10.00 GiB", result.output)


def test_doctor_names_every_problem_with_its_remedy(tpu, monkeypatch):
    answer = [
        Check("Versions", "torch", "2.13.0"),
        Check("Device", "torch_xla", "2.9 is installed too", "warning", "Uninstall torch_xla."),
    ]
    monkeypatch.setattr("tpu_core.cli.doctor.run_checks", lambda quick: answer)
    result = tpu("doctor")
    assert result.exit_code == 0  # a warning keeps nothing from working
    assert "1 problem\n" in result.output
    assert "Uninstall torch_xla." in result.output
    answer.append(Check("Platform", "platform", "no TPU", "broken", "Run on a TPU VM."))
    result = tpu("doctor")
    assert result.exit_code == 1
    assert "2 problems" in result.output
    del answer[1:]
    result = tpu("doctor")
    assert result.exit_code == 0
    assert "No problems found." in result.output


def test_doctor_as_json(tpu):
    checks_found = json.loads(tpu("doctor", "--json").output)
    assert {"section", "name", "value", "status", "remedy"} == set(checks_found[0])
    assert all(c["remedy"] for c in checks_found if c["status"] != "ok")


def test_doctor_reports_invalid_and_misspelt_variables(tpu):
    result = tpu("doctor", TPU_EAGER_MODE="fussed", TPU_FALBACK="error", TPU_VISIBLE_CHIPS="0")
    assert result.exit_code == 1
    assert "TPU_EAGER_MODE='fussed' is not valid." in result.output
    assert "valid: debug, strict, fused" in result.output
    assert "Did you mean TPU_FALLBACK?" in result.output
    assert "TPU_VISIBLE_CHIPS: is read by nothing" not in result.output


def test_doctor_reports_a_tpu_that_is_not_there(tpu, monkeypatch):
    nothing = platforms.Chips((), (), 1, False, None)
    monkeypatch.setattr(platforms, "_chips", lambda: nothing)
    result = tpu("doctor", TPU_PLATFORM="tpu")
    assert result.exit_code == 1
    assert re.search(r"broken +platform +\[TPU1001\] TPU_PLATFORM=tpu, but no TPU", result.output)
    assert "Run on a TPU VM, or unset TPU_PLATFORM" in result.output


def test_doctor_reports_a_plugin_that_is_not_installed(tpu):
    tpu("doctor", TPU_PLATFORM="nosuch")
    check = found(checks.check_platform(), "platform")
    assert check.status == "warning"
    assert "Install a PJRT plug-in for 'nosuch'" in check.remedy


def test_doctor_reports_an_unusable_cache_folder(tpu, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    result = tpu("doctor")
    assert re.search(r"warning +folder +\S+cache is not a folder", result.output)
    assert "TPU_CACHE_DIR" in result.output


def test_doctor_says_whether_the_shared_cache_answers(tpu, tmp_path):
    assert re.search(r"ok +shared +off", tpu("doctor").output)
    good = tpu("doctor", TPU_CACHE_URL=f"file://{tmp_path}/shared")
    assert re.search(r"ok +shared +file://\S+/shared \(readable\)", good.output)
    bad = tpu("doctor", TPU_CACHE_URL="nosuch://user:secret@bucket/programs")
    assert re.search(r"warning +shared +nosuch://...@bucket/programs cannot be read", bad.output)
    assert "Check TPU_CACHE_URL" in bad.output
    assert "secret" not in bad.output


def test_doctor_reports_torch_of_another_version(monkeypatch):
    monkeypatch.setattr(CORE, "builds", lambda: {"2.11": Path(), "2.12": Path()})
    check = checks._check_extension("2.13.0+cpu")
    assert check.status == "broken"
    assert check.value == "2.13.0+cpu, and tpu-core was built for 2.11, 2.12"
    assert "pip install torch==2.12.*" in check.remedy
    assert checks._check_extension("2.12.0").status == "ok"


def test_doctor_reports_an_extension_that_is_not_built(monkeypatch):
    monkeypatch.setattr(CORE, "builds", dict)
    check = checks._check_extension("2.13.0")
    assert check.status == "broken"
    assert "the extension of tpu-core is not built for Python 3." in check.value


def fake_versions(monkeypatch, **versions):
    def version(name):
        if name in versions:
            return versions[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", version)


def test_doctor_compares_jaxlib_and_libtpu_with_what_jax_asks_for(monkeypatch):
    fake_versions(
        monkeypatch, torch="2.13.0", jax="0.10.2", jaxlib="0.9.0", numpy="2", libtpu="0.0.51"
    )
    requirements = [
        "jaxlib<=0.10.2,>=0.10.1",
        'jaxlib==0.10.1; extra == "minimum-jaxlib"',
        'libtpu==0.0.42.*; extra == "tpu"',
    ]
    asked_for = {"jax": requirements, "tpu-core": ["jax<0.13,>=0.10"]}
    monkeypatch.setattr(checks.metadata, "requires", lambda name: asked_for[name])
    answer = list(checks.check_versions())
    jaxlib, libtpu = found(answer, "jaxlib"), found(answer, "libtpu")
    assert jaxlib.status == "broken"
    assert jaxlib.remedy == 'Install that: pip install "jaxlib<=0.10.2,>=0.10.1"'
    assert libtpu.status == "warning"
    assert libtpu.value == "0.0.51, and jax 0.10.2 asks for ==0.0.42.*"
    assert found(answer, "ml_dtypes").status == "broken"
    assert found(answer, "ml_dtypes").remedy == "Install it: pip install ml_dtypes"


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0"])
def test_doctor_compares_jax_with_what_tpu_core_asks_for(monkeypatch, version):
    fake_versions(monkeypatch, **{"tpu-core": "0.1.0", "jax": version})
    asked_for = {"jax": [], "tpu-core": ["jax<0.13,>=0.10", "jaxlib<0.13,>=0.10"]}
    monkeypatch.setattr(checks.metadata, "requires", lambda name: asked_for[name])
    jax = found(checks.check_versions(), "jax")
    assert jax.status == "broken"
    assert jax.value == f"{version}, and tpu-core 0.1.0 asks for <0.13,>=0.10"
    assert jax.remedy == 'Install that: pip install "jax<0.13,>=0.10"'


def test_the_installed_jax_and_jaxlib_fit():
    assert found(checks.check_versions(), "jaxlib").status == "ok"


@pytest.mark.parametrize(
    ("version", "pins", "holds"),
    [
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.421", "==0.0.42.*", False),
        ("0.10.2", "<=0.10.2,>=0.10.1", True),
        ("0.10.3", "<=0.10.2,>=0.10.1", False),
        ("0.9", ">=0.10.1", False),
        ("1.0", "==1.0.0", True),
        ("1.0", "!=1.0", False),
        ("2", ">1,<3", True),
        ("2.13.0+cpu", "==2.13.*", True),
    ],
)
def test_satisfies(version, pins, holds):
    assert satisfies(version, pins) is holds


def test_doctor_reports_other_backends(monkeypatch):
    fake_versions(monkeypatch, torch_tpu="0.1")
    points = [metadata.EntryPoint("npu", "some_npu:load", "torch.backends")]
    monkeypatch.setattr(checks.metadata, "entry_points", lambda group: points)
    answer = list(checks.check_registration())
    assert found(answer, "torch_tpu").value == "0.1 is installed too"
    assert "separate virtual environment" in found(answer, "torch_tpu").remedy
    assert found(answer, "backend npu").status == "warning"


@pytest.mark.parametrize(
    ("holder", "status", "text"),
    [
        ("npu", "broken", "held by another backend, as 'npu'"),
        ("privateuseone", "broken", "free: tpu-core was not loaded by import torch"),
    ],
)
def test_doctor_reports_who_holds_the_device_slot(monkeypatch, holder, status, text):
    import torch

    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: holder)
    check = checks._check_slot()
    assert (check.status, check.value) == (status, text)
    assert check.remedy


def test_the_doctor_imports_neither_jax_nor_starts_a_device():
    code = (
        "from tpu_core.cli import checks; checks.run_checks(); "
        "print([m for m in ('jax', 'jaxlib', 'libtpu') if m in sys.modules])"
    )
    source = str(Path(checks.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_ops_lists_the_registry(tpu):
    rows = registered_ops()
    result = tpu("ops")
    assert result.exit_code == 0
    assert rows[0]["op"] in result.output
    families = {row["family"] for row in rows}
    assert f"{len(rows)} overloads in {len(families)} families" in result.output
    assert json.loads(tpu("ops", "--json").output) == rows
    assert not any(Path(row["location"]).is_absolute() for row in rows)


def test_ops_names_are_never_cut(tpu):
    result = tpu("ops", COLUMNS="40")
    for row in registered_ops():
        assert row["op"] in result.output


def test_ops_of_one_family(tpu):
    rows = json.loads(tpu("ops", "--family", "matmul", "--json").output)
    assert "aten.mm.default" in {row["op"] for row in rows}
    assert {row["family"] for row in rows} == {"matmul"}
    result = tpu("ops", "--family", "nosuch")
    assert result.exit_code == 2
    assert "There is no family 'nosuch'" in result.output


def test_missing_ops_are_those_that_nothing_covers(tpu):
    names = missing_ops()
    assert names == sorted(set(names))
    assert not set(names) & {row["op"] for row in registered_ops()}
    assert "aten.view.default" not in names  # a view
    assert "aten.add_.Tensor" not in names  # in-place
    assert "aten.linear.default" not in names  # decomposes first
    assert not [name for name in names if "mkldnn" in name or "_test_" in name]
    assert json.loads(tpu("ops", "--missing", "--json").output) == names
    assert f"{len(names)} overloads" in tpu("ops", "--missing").output


def fill(tmp_path):
    store = ExecutableStore(tmp_path / "cache", 1 << 30)
    for i in range(3):
        store.put(f"key {i}", bytes(1000), {"ops": i, "kind": "[segment]"})
        os.utime(store.path(f"key {i}"), (i * 1e9, i * 1e9))
    return store


def test_cache_ls(tpu, tmp_path):
    assert "0 entries, 0 B of 10.00 GiB" in tpu("cache", "ls").output
    fill(tmp_path)
    output = tpu("cache", "ls").output
    assert "3 entries" in output
    assert "kind=[segment], ops=2" in output
    assert output.index("key 2") < output.index("key 0")


def test_cache_verify(tpu, tmp_path):
    store = fill(tmp_path)
    result = tpu("cache", "verify")
    assert result.exit_code == 0
    assert f"3 entries in {store.directory} are intact." in result.output
    store.path("key 1").write_bytes(b"junk")
    result = tpu("cache", "verify")
    assert result.exit_code == 1
    assert f"{store.path('key 1')} is truncated" in result.output


def test_cache_prune(tpu, tmp_path):
    store = fill(tmp_path)
    assert tpu("cache", "prune").exit_code == 2
    assert tpu("cache", "prune", "--size", "big").exit_code == 2
    assert tpu("cache", "prune", "--age", "1 day").exit_code == 2
    assert len(store.ls()) == 3
    # Of three entries of one size, two fit.
    size = sum(info.size for info in store.ls()[:2])
    assert tpu("cache", "prune", "--size", str(size)).output.startswith("Removed 1 entries, ")
    assert [info.key for info in store.ls()] == ["key 2", "key 1"]
    os.utime(store.path("key 2"))
    assert tpu("cache", "prune", "--age", "30d").output.startswith("Removed 1 entries, ")
    assert tpu("cache", "prune", "--all").output.startswith("Removed 1 entries, ")
    assert store.ls() == []


@pytest.mark.parametrize("command", ["ls", "prune"])
def test_cache_commands_refuse_a_folder_that_others_can_write(tpu, tmp_path, command):
    store = fill(tmp_path)
    store.directory.chmod(0o777)
    result = tpu("cache", command, *(["--all"] if command == "prune" else []))
    assert result.exit_code == 1
    assert "can be written by other users" in result.stderr
    assert len(list(store.directory.rglob("*.tpux"))) == 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("10m", 600), ("1.5h", 5400), ("30d", 2592000), ("4W", 2419200)],
)
def test_parse_age(text, seconds):
    assert parse_age(text) == seconds


def plug_in(monkeypatch, **points):
    """Let packages plug subcommands in: ``plug_in(monkeypatch, aot="module:app")``."""
    found_points = {
        name: metadata.EntryPoint(name, value, app_module.ENTRY_POINT_GROUP)
        for name, value in points.items()
    }
    monkeypatch.setattr(app_module, "_plugins", lambda: found_points)


def test_other_packages_plug_subcommands_in(tpu, monkeypatch):
    plugin = typer.Typer(help="Compile ahead of time.")

    @plugin.command()
    def run(topology: str) -> None:
        print(f"compiled for {topology}")

    module = types.ModuleType("a_plugin")
    module.app = plugin
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    plug_in(monkeypatch, aot="a_plugin:app", doctor="a_plugin:app")
    assert "aot" in tpu("--help").output
    assert tpu("aot", "v5e:2x2").output == "compiled for v5e:2x2\n"
    assert "Versions" in tpu("doctor").output  # our own subcommands cannot be replaced


def test_a_broken_plug_in_says_so_and_breaks_nothing_else(tpu, monkeypatch):
    plug_in(monkeypatch, aot="no_such_module:app")
    result = tpu("aot", "--anything")
    assert result.exit_code == 1
    assert "The subcommand 'aot' of no_such_module:app cannot be loaded" in result.stderr
    assert tpu("--help").exit_code == 0
    assert "Versions" in tpu("doctor").output


def test_python_m_tpu_core_prints_our_errors_without_a_traceback(tmp_path):
    source = str(Path(checks.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "tpu_core", "cache", "ls"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": path_with(source),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TPU_CACHE_SIZE": "lots",
        },
        check=False,
    )
    assert done.returncode == 1
    assert "ConfigurationError: [TPU1015] TPU_CACHE_SIZE='lots' is not valid." in done.stderr
    assert "Traceback" not in done.stderr

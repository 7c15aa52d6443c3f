"""The configuration: parsing, validation, overrides, misspelt variables and the docs table."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from tpu_core import config as module
from tpu_core.config import (
    Config,
    config,
    from_environment,
    override,
    settings,
)
from tpu_core.config.page import config_page
from tpu_core.config.spelling import misspelt_variables
from tpu_core.errors import ConfigurationError, TpuError


@pytest.fixture
def not_started(monkeypatch):
    """A process whose device has not started."""
    monkeypatch.setattr(module, "_at_start", None)


def test_defaults_of_an_empty_environment():
    found = from_environment({})
    assert found.platform is None
    assert found.num_devices is None
    assert found.visible_devices is None
    assert found.eager_mode is None
    assert (found.fallback, found.cache, found.log_level) == ("warn", "on", "warning")
    assert found.cache_size == 10 * 1024**3
    assert found.cache_dir.name == "tpu-core"
    assert found.segment_ops == 2_000
    assert found.debug_nans is False
    assert found.memory_limit is None
    assert found.dump_dir is None


@pytest.mark.parametrize(
    ("env", "text", "field", "value"),
    [
        ("TPU_PLATFORM", "cpu", "platform", "cpu"),
        ("TPU_PLATFORM", "CUDA", "platform", "cuda"),
        ("TPU_PLATFORM", "auto", "platform", None),
        ("TPU_NUM_DEVICES", "8", "num_devices", 8),
        ("TPU_VISIBLE_DEVICES", "2, 0", "visible_devices", (2, 0)),
        ("TPU_EAGER_MODE", "Debug", "eager_mode", "debug"),
        ("TPU_FALLBACK", "error", "fallback", "error"),
        ("TPU_CACHE_DIR", "some/where", "cache_dir", Path("some/where")),
        ("TPU_CACHE_SIZE", "500M", "cache_size", 500 * 1024**2),
        ("TPU_CACHE", "off", "cache", "off"),
        ("TPU_MEMORY_LIMIT", "1.5GiB", "memory_limit", 3 * 1024**3 // 2),
        ("TPU_SEGMENT_OPS", "100", "segment_ops", 100),
        ("TPU_DEBUG_NANS", "yes", "debug_nans", True),
        ("TPU_DUMP", "dump", "dump_dir", Path("dump")),
        ("TPU_FLIGHT_RECORDS", "50", "flight_records", 50),
        ("TPU_FLIGHT_DIR", "flights", "flight_dir", Path("flights")),
        ("TPU_LOG", "info", "log_level", "info"),
    ],
)
def test_each_variable_is_read(env, text, field, value):
    assert getattr(from_environment({env: text}), field) == value


@pytest.mark.parametrize(
    ("env", "text", "valid"),
    [
        ("TPU_EAGER_MODE", "fussed", "debug, strict, fused"),
        ("TPU_FALLBACK", "never", "warn, error, allow"),
        ("TPU_CACHE", "disk", "on, off"),
        ("TPU_LOG", "trace", "warning, info, debug"),
        ("TPU_NUM_DEVICES", "0", "an integer of at least 1"),
        ("TPU_NUM_DEVICES", "two", "an integer of at least 1"),
        ("TPU_VISIBLE_DEVICES", "0,0", "distinct device indices such as 0,1,3"),
        ("TPU_VISIBLE_DEVICES", "-1", "distinct device indices"),
        ("TPU_CACHE_SIZE", "10 gigs", "a number of bytes such as 4096, 500M or 10G"),
        ("TPU_MEMORY_LIMIT", "-5", "a number of bytes"),
        ("TPU_DEBUG_NANS", "maybe", "1, 0, true, false, on, off, yes, no"),
        ("TPU_PLATFORM", "c p u", "auto, tpu, cpu, or a PJRT plug-in's name"),
    ],
)
def test_an_invalid_value_is_refused_with_what_is_valid(env, text, valid):
    with pytest.raises(ConfigurationError) as raised:
        from_environment({env: text})
    message = str(raised.value)
    assert f"{env}={text!r} is not valid." in message
    assert f"valid: {valid}" in message
    assert "docs/reference/errors.md#tpu1015" in message
    assert isinstance(raised.value, (TpuError, ValueError))


def test_modes_of_other_packages_are_valid_and_listed(monkeypatch):
    from importlib import metadata

    mode = metadata.EntryPoint("lazy", "acme:MODE", "tpu_core.modes")
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: metadata.EntryPoints([mode]).select(group=group)
    )
    assert from_environment({"TPU_EAGER_MODE": "lazy"}).eager_mode == "lazy"
    with pytest.raises(ConfigurationError, match="valid: debug, strict, fused, lazy"):
        from_environment({"TPU_EAGER_MODE": "lasy"})
    with pytest.raises(ConfigurationError, match="valid: warn, error, allow\n"):
        from_environment({"TPU_FALLBACK": "lazy"})


def test_an_empty_variable_counts_as_unset():
    assert from_environment({"TPU_EAGER_MODE": "", "TPU_NUM_DEVICES": " "}) == from_environment({})


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("1k", 1024), ("1KB", 1024), ("2MiB", 2 << 20), ("1T", 1 << 40)],
)
def test_sizes_are_in_binary_units(text, size):
    assert module.from_environment({"TPU_MEMORY_LIMIT": text}).memory_limit == size


def test_override_changes_a_block_and_nests(not_started):
    before = config()
    with override(fallback="error", cache_size="500M") as outer:
        assert config() is outer
        assert config().fallback == "error"
        assert config().cache_size == 500 * 1024**2
        with override(fallback="allow", visible_devices=[1, 0]):
            assert config().fallback == "allow"
            assert config().visible_devices == (1, 0)
            assert config().cache_size == 500 * 1024**2
        assert config().fallback == "error"
    assert config() is before


def test_override_is_undone_after_an_error():
    before = config()
    with pytest.raises(ZeroDivisionError), override(fallback="error"):
        _ = 1 / 0
    assert config() is before


def test_override_refuses_invalid_values_and_unknown_fields(not_started):
    with pytest.raises(ConfigurationError, match="TPU_FALLBACK='never' is not valid"):
        with override(fallback="never"):
            pass
    with pytest.raises(ConfigurationError, match="There is no setting 'falback'") as raised:
        with override(falback="error"):
            pass
    assert "fallback" in str(raised.value).split("valid:")[1]
    with pytest.raises(ConfigurationError, match="TPU_CACHE_SIZE='None' is not valid"):
        with override(cache_size=None):
            pass


def test_override_refuses_what_the_device_has_read(not_started):
    with override(num_devices=8):
        module.started()
        with override(num_devices=8, fallback="error"):
            assert config().fallback == "error"
        before = config()
        message = "The device has started, and settings that it reads then cannot be changed"
        with pytest.raises(ConfigurationError, match=message) as raised:
            with override(num_devices=4, tiers="host", fallback="error"):
                pass
        assert raised.value.values == {"TPU_NUM_DEVICES": 4, "TPU_TIERS": "host"}
        assert config() is before
    # The value that the device has read, and the one that is in force, change nothing.
    with override(num_devices=8), override(num_devices=8):
        pass
    with override(num_devices=config().num_devices):
        pass


def test_starting_the_device_is_noted():
    import torch

    torch.ones(1, device="tpu")
    other = "host" if config().tiers != "host" else "auto"
    with pytest.raises(ConfigurationError, match="TPU_TIERS: "), override(tiers=other):
        pass


def test_override_is_not_seen_by_other_threads():
    seen = []
    with override(fallback="error"):
        thread = threading.Thread(target=lambda: seen.append(config().fallback))
        thread.start()
        thread.join()
    assert seen == [config().fallback]


def test_the_environment_is_read_once(monkeypatch):
    first = module.reload()
    monkeypatch.setenv("TPU_FALLBACK", "error" if first.fallback != "error" else "allow")
    assert config() is first
    assert module.reload().fallback != first.fallback
    monkeypatch.undo()
    module.reload()


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().fallback = "error"  # type: ignore[misc]


def test_misspelt_variables_are_found_and_those_of_libtpu_left_alone():
    environ = {
        "TPU_FALBACK": "error",
        "TPU_EAGERMODE": "debug",
        "TPU_FALLBACK": "warn",
        "TPU_LIBRARY_PATH": "x",
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_LOG_DIR": "disabled",
        "TPU_WORKER_ID": "0",
        "TPU_SOMETHING_ELSE_ENTIRELY": "1",
        "PATH": "x",
    }
    assert misspelt_variables(environ) == [
        ("TPU_EAGERMODE", "TPU_EAGER_MODE"),
        ("TPU_FALBACK", "TPU_FALLBACK"),
    ]


def test_every_field_has_a_variable_and_a_row_on_the_docs_page():
    page = config_page()
    specs = settings()
    assert [spec.name for spec in specs] == [f.name for f in dataclasses.fields(Config)]
    assert len({spec.env for spec in specs}) == len(specs)
    for spec in specs:
        assert spec.env.startswith("TPU_")
        row = next(line for line in page.splitlines() if line.startswith(f"| `{spec.env}` "))
        assert row.count("|") == 6
        assert spec.doc in row
        assert f"`{spec.name}` |" in row
        assert spec.kind.valid in row
    assert "`TPU_NUM_DEVICES`" in page.split("refuses to change them:")[1]
    assert str(Path.home()) not in page

"""Typed errors: message format, classes, the docs page, and the mapping of XLA's status text."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpu_core import errors
from tpu_core.errors import (
    CompilationError,
    DonatedBufferError,
    ExecutionError,
    OutOfMemoryError,
    TpuError,
    TpuNotAvailableError,
    format_bytes,
    map_xla_error,
)
from tpu_core.errors.page import error_classes, errors_page

ERRORS = [c for c in error_classes() if issubclass(c, TpuError)]


def test_a_message_says_what_values_line_remedy_and_link():
    error = ExecutionError(
        "A program failed.",
        values={"op": "aten.add.Tensor", "shapes": [(2, 3)]},
        line="train.py:31",
        remedy="Try again.",
    )
    assert str(error).splitlines() == [
        "[TPU1009] A program failed.",
        "  op: aten.add.Tensor",
        "  shapes: [(2, 3)]",
        "  at train.py:31",
        "What to do: Try again.",
        "See docs/reference/errors.md#tpu1009",
    ]
    assert error.line == "train.py:31"
    assert error.values["op"] == "aten.add.Tensor"


def test_the_base_of_links_is_a_setting(monkeypatch):
    before = ExecutionError("A program failed.")
    monkeypatch.setenv("TPU_DOCS_URL", "https://docs.example/tpu/")
    error = ExecutionError("A program failed.")
    assert str(error).endswith("\nSee https://docs.example/tpu/reference/errors/#tpu1009")
    # A message of another process stays as it is.
    assert str(ExecutionError(str(before))) == str(before)
    monkeypatch.delenv("TPU_DOCS_URL")
    assert str(ExecutionError(str(error))) == str(error)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda c: c.__name__)
def test_every_error_is_a_runtime_error_with_a_code_and_advice(cls):
    error = cls("Something happened.")
    assert isinstance(error, RuntimeError)
    assert re.fullmatch(r"TPU1\d{3}", cls.code)
    assert cls.docs_anchor == cls.code.lower()
    assert f"See docs/reference/errors.md#{cls.docs_anchor}" in str(error)
    if cls is not TpuError:
        assert "What to do: " in str(error)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda c: c.__name__)
def test_errors_survive_pickle_copy_and_rebuilding_from_their_message(cls):
    error = cls("Something happened.", line="a.py:1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.line == "a.py:1"
    assert str(copy.copy(error)) == str(error)
    # torch.utils.data re-raises a worker's error as `cls(text)`, the traceback around the message.
    text = f"Caught {cls.__name__} in DataLoader worker process 0.\n{error}"
    assert str(cls(text)) == text


def test_classes_that_are_pytorch_errors_too():
    assert issubclass(errors.UnsupportedOpError, NotImplementedError)
    assert issubclass(errors.OutOfMemoryError, torch.OutOfMemoryError)
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.CacheWarning, UserWarning)
    assert issubclass(errors.FallbackWarning, UserWarning)
    assert issubclass(errors.DeviceSlotTakenWarning, UserWarning)
    with pytest.raises(torch.OutOfMemoryError):
        raise OutOfMemoryError(needed=1)


def test_out_of_memory_lists_needed_limit_and_live():
    error = OutOfMemoryError(needed=4 << 30, limit=16 << 30, live=13 << 30, line="m.py:2")
    assert (error.needed, error.limit, error.live) == (4 << 30, 16 << 30, 13 << 30)
    message = str(error)
    assert "needed: 4.00 GiB" in message
    assert "limit: 16.00 GiB" in message
    assert "live: 13.00 GiB" in message
    assert "needed:" not in str(OutOfMemoryError(limit=1))


def test_codes_are_unique_but_for_an_error_and_its_warning():
    codes: dict[str, list[type]] = {}
    for cls in error_classes():
        codes.setdefault(cls.code, []).append(cls)
    for code, classes in codes.items():
        assert len([c for c in classes if not issubclass(c, Warning)]) <= 1, code
        assert len([c for c in classes if issubclass(c, Warning)]) <= 1, code


def test_the_docs_page_has_a_complete_section_for_each_class():
    page = errors_page()
    for cls in error_classes():
        assert page.count(f'<a id="{cls.docs_anchor}"></a>') == 1
        assert f"[{cls.code}](#{cls.docs_anchor})" in page
        section = page.split(f"\n## {cls.code}: {cls.__name__}\n")[1].split("\n## ")[0]
        if cls is errors.DeviceSlotTakenWarning:
            continue  # its text is that of the error above it
        assert "**How it happens.**" in section
        assert "```" in section
        assert "**How to fix it.**" in section
        assert "Args:" not in section
    assert page.count("```") % 2 == 0
    assert "\n\n\n" not in page


@pytest.mark.parametrize(
    ("text", "cls", "sizes"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.",
            OutOfMemoryError,
            (4096, None),
        ),
        (
            "RESOURCE_EXHAUSTED: Attempting to allocate 8.00G. That was not possible. "
            "There are 7.54G free.",
            OutOfMemoryError,
            (8 << 30, None),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile error. Ran out of memory in memory space "
            "hbm. Used 24.00G of 16.00G hbm. Exceeded hbm capacity by 8.00G.",
            OutOfMemoryError,
            (24 << 30, 16 << 30),
        ),
        (
            "UNIMPLEMENTED: Custom call target PadToStatic is not implemented",
            CompilationError,
            None,
        ),
        ("INVALID_ARGUMENT: Binary op add with different element types", CompilationError, None),
        ("INTERNAL: during context [pre-optimization]: something", CompilationError, None),
        ("NOT_FOUND: No registered implementation for untyped custom call", CompilationError, None),
        (
            "INVALID_ARGUMENT: Execution supplied 0 arguments but compiled program expected 1",
            ExecutionError,
            None,
        ),
        ("INVALID_ARGUMENT: Buffer has been deleted or donated.", DonatedBufferError, None),
        ("Array has been deleted with shape=float32[3].", DonatedBufferError, None),
        (
            "INTERNAL: Gloo all-reduce failed: [external/gloo/transport/tcp/pair.cc:538] "
            "Connection closed by peer [127.0.0.1]:5123",
            errors.PeerLostError,
            None,
        ),
        (
            "Backend 'tpu' failed to initialize: INTERNAL: Failed to open libtpu.so",
            TpuNotAvailableError,
            None,
        ),
        ("UNAVAILABLE: connection closed", ExecutionError, None),
        ("", ExecutionError, None),
    ],
)
def test_status_text_is_mapped(text, cls, sizes):
    error = map_xla_error(RuntimeError(text), op="aten.add.Tensor", line="t.py:3", shapes="f32[2]")
    assert type(error) is cls
    assert "t.py:3" in str(error)
    assert "op: aten.add.Tensor" in str(error)
    assert "shapes: f32[2]" in str(error)
    if text:
        assert text in str(error)
    if sizes:
        assert (error.needed, error.limit) == sizes


def test_the_stage_wins_over_the_text():
    status = RuntimeError("INTERNAL: something")
    assert type(map_xla_error(status, stage="run")) is ExecutionError
    assert type(map_xla_error(status, stage="compile")) is CompilationError
    assert type(map_xla_error(RuntimeError("UNKNOWN: x"), stage="compile")) is CompilationError
    out = map_xla_error(RuntimeError("RESOURCE_EXHAUSTED: x"), stage="compile", limit=8, live=4)
    assert type(out) is OutOfMemoryError
    assert (out.needed, out.limit, out.live) == (None, 8, 4)


def test_our_own_errors_pass_through():
    error = ExecutionError("x")
    assert map_xla_error(error) is error


def test_real_errors_of_jax_are_mapped():
    import jax
    import jax.numpy as jnp

    donated = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    with pytest.raises(RuntimeError) as deleted:
        donated + 1
    assert type(map_xla_error(deleted.value)) is DonatedBufferError

    with pytest.raises(RuntimeError) as exhausted:
        jnp.zeros((1 << 45,), jnp.float32).block_until_ready()
    error = map_xla_error(exhausted.value)
    assert type(error) is OutOfMemoryError
    assert error.needed == 4 << 45


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 << 40, "3.00 TiB"),
        (1 << 50, "1024.00 TiB"),
    ],
)
def test_format_bytes(n, text):
    assert format_bytes(n) == text


def test_importing_does_not_import_jax_or_rich():
    code = (
        "import sys, tpu_core.errors, tpu_core.config, tpu_core.metrics, tpu_core.cache, "
        "tpu_core.platforms, tpu_core.logs\n"
        "print([m for m in ('jax', 'jaxlib', 'rich', 'typer', 'platformdirs') if m in sys.modules])"
    )
    source = str(Path(errors.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"],
        capture_output=True,
        text=True,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""},
        check=True,
    )
    assert done.stdout.strip() == "[]"

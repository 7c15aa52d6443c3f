"""Functions that wait for a module to be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpu_core.import_hooks import when_imported


def test_called_once_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    finders = list(sys.meta_path)
    when_imported({"awaited_module": lambda module: called.append((module.value, module.__name__))})
    assert not called
    for _ in range(2):
        __import__("awaited_module")
    assert called == [(3, "awaited_module")]
    assert sys.meta_path == finders


def test_called_at_once_for_what_is_imported() -> None:
    called = []
    when_imported({"sys": called.append})
    assert called == [sys]

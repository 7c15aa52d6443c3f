"""Modes of the tests of this package, and of the processes that they start.

Debug and Fused come with tpu-eager. In their place are the modes of ``installed``, which stand on
``tpu_core.extend`` alone: the tests run in the one that records segments of many ops.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowering_type_checks

FOLDER = str(Path(__file__).with_name("installed"))

lowering_type_checks.install()


def pytest_configure() -> None:
    # Before the device starts, and before names of modes are looked up.
    sys.path.append(FOLDER)
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ.setdefault("TPU_EAGER_MODE", "segments")


@pytest.fixture
def fusion_emitters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs as users have them; the root's ``conftest.py`` leaves the emitters out.

    Without them float8 and some contractions round otherwise. No key of a program says it, so this
    is for tests whose programs are their own.
    """
    from tpu_core import _C
    from tpu_core.pjrt import known_faults

    if os.environ.get("TPU_PLATFORM", "cpu") in ("cpu", "auto"):
        options = (*known_faults.compile_options("cpu"), ("xla_cpu_use_fusion_emitters", True))
        monkeypatch.setattr(known_faults, "compile_options", lambda platform: options)
    _C.clear_programs()
    yield
    _C.clear_programs()

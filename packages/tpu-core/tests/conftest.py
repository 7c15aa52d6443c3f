"""Modes of the tests of this package, and of the processes that they start.

Debug and Fused come with tpu-eager. In their place are the modes of ``installed``, which stand on
``tpu_core.extend`` alone: the tests run in the one that records segments of many ops.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lowering_type_checks

FOLDER = str(Path(__file__).with_name("installed"))

lowering_type_checks.install()


def pytest_configure() -> None:
    # Before the device starts, and before names of modes are looked up.
    sys.path.append(FOLDER)
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ.setdefault("TPU_EAGER_MODE", "segments")

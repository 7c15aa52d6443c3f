"""One temporary cache of programs for the whole session, so that tests share what they compile."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Before the device starts; worker processes and the tests' own inherit it.
    if not hasattr(config, "workerinput"):
        config.stash[FOLDER] = os.environ["TPU_CACHE_DIR"] = tempfile.mkdtemp(prefix="tpu-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


FOLDER = pytest.StashKey[str]()

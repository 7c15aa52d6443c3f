"""What all tests share: a temporary cache of programs, compiles that are waited for, and the same
random numbers in each run.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    # Before the device starts; worker processes and the tests' own inherit it.
    # What is compiled must not depend on which ops the tests before have used.
    os.environ["TPU_COMPILE"] = "blocking"
    # Nor on how many programs they had for a line that tests share.
    os.environ.setdefault("TPU_RECOMPILE_LIMIT", "0")
    # Tests say what programs compute; those of the tiers choose theirs.
    os.environ.setdefault("TPU_TIERS", "compiled")
    # A quarter of the time of tests was LLVM's optimizations; the fuzzers have them.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # A worker of xdist has a folder of its own, as tests count what is compiled.
    config.stash[FOLDER] = os.environ["TPU_CACHE_DIR"] = tempfile.mkdtemp(prefix="tpu-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


FOLDER = pytest.StashKey[str]()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

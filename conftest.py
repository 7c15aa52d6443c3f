"""What all tests share: a temporary cache of programs, compiles that are waited for, the same
random numbers in each run, and the tiers that a test asks for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="a part of the tests, such as 2/8")


def pytest_configure(config: pytest.Config) -> None:
    # Before the device starts; worker processes and the tests' own inherit it.
    # What is compiled must not depend on which ops the tests before have used.
    os.environ["TPU_COMPILE"] = "blocking"
    # Nor on how many programs they had for a line that tests share.
    os.environ.setdefault("TPU_RECOMPILE_LIMIT", "0")
    # Tests say what programs compute; those of the tiers choose theirs.
    os.environ.setdefault("TPU_TIERS", "compiled")
    if ON_CPU:
        # Most of the time of tests is XLA's compiler: LLVM's optimizations were a quarter of it,
        # the emitters of fusions half. The fuzzers have both, `integration/tests` the emitters.
        flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        os.environ.setdefault("XLA_FLAGS", flags)
    # A worker of xdist has a folder of its own, as tests count what is compiled.
    config.stash[FOLDER] = os.environ["TPU_CACHE_DIR"] = tempfile.mkdtemp(prefix="tpu-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


FOLDER = pytest.StashKey[str]()
ON_CPU = os.environ.get("TPU_PLATFORM", "cpu") in ("cpu", "auto")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--shard").split("/"))
    items[:] = items[part - 1 :: parts]
    if not ON_CPU:
        for item in items:
            # What the CPU platform alone has, as memory that NumPy sees: each mark says what.
            for mark in item.iter_markers("of_cpu"):
                item.add_marker(pytest.mark.skip(reason=mark.kwargs["reason"]))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def host() -> Iterator[None]:
    """CPU kernels wherever there is one."""
    yield from _tiers("host")


@pytest.fixture
def restless() -> Iterator[None]:
    """Segments go over to programs when they come for the third time."""
    yield from _tiers("auto", patience=0.0)


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tiers that a test is parametrized with (``indirect=True``)."""
    yield from _tiers(request.param)


@pytest.fixture(params=["compiled", "restless", "host"])
def every_tier(request: pytest.FixtureRequest) -> None:
    """Each test once with programs alone, with segments that go over to them, with CPU kernels."""
    if request.param != "compiled":
        request.getfixturevalue(request.param)


@pytest.fixture
def fusion_emitters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs as users have them: without the emitters XLA rounds some fusions otherwise.

    Float8, for one, and what a loop computes twice. No key of a program says it, so this is for
    tests whose programs are their own.
    """
    from tpu_core import _C
    from tpu_core.pjrt import known_faults

    if ON_CPU:
        options = (*known_faults.compile_options("cpu"), ("xla_cpu_use_fusion_emitters", True))
        monkeypatch.setattr(known_faults, "compile_options", lambda platform: options)
    torch.zeros(1, device="tpu")
    _C.flush()
    _C.clear_programs()
    yield
    _C.flush()
    _C.clear_programs()


@pytest.fixture
def first_runs_judged() -> Iterator[None]:
    """Each program's first run is judged; no program is left of other tests."""
    from tpu_core import _C
    from tpu_core.config import override

    torch.zeros(1, device="tpu")
    with override(verify="first"):
        _C.flush()
        _C.clear_programs()
        yield
        _C.flush()
    _C.clear_programs()


def _tiers(name: str, patience: float | None = None) -> Iterator[None]:
    # Imports here: a test that asks for no tiers finds the extension as torch leaves it.
    from tpu_core import _C, tiers
    from tpu_core.config import config

    if not ON_CPU and name != "compiled":
        # As `tpu_core.tiers.choose` decides: elsewhere programs alone run.
        pytest.skip("CPU kernels need memory of the host")
    torch.zeros(1, device="tpu")
    _C.flush()
    _C.set_tiers(tiers.NUMBERS[name])
    _C.set_patience(config().tier_patience if patience is None else patience)
    yield
    _C.flush()
    _C.set_tiers(tiers.NUMBERS["compiled"])
    _C.set_patience(config().tier_patience)

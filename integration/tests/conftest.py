"""Programs across packages are compiled by the emitters that users have; trainings are shared."""

from __future__ import annotations

import os

import pytest


def pytest_configure() -> None:
    # Before the root's own, which leaves what is set.
    if os.environ.get("TPU_PLATFORM", "cpu") in ("cpu", "auto"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give all tests of a training to one worker of xdist: `training.train` keeps it."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item.module, "train"):
            continue
        arguments = item.callspec.params if hasattr(item, "callspec") else {}
        if "name" in arguments:
            group = f"{arguments['name']} {arguments.get('mode', 'fused')}"
            item.add_marker(pytest.mark.xdist_group(group))

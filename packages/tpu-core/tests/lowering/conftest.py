"""Sweeps through OpInfo that run by default.

``integration/tests/test_conformance.py`` runs every op on the device. The sweeps here go through
more dtypes, samples and gradients, and take a quarter of an hour: by default those of the families
whose gradients take several kernels, all of them in ``nox -s slow``. All other tests run by
default.
"""

from __future__ import annotations

import pytest

DEFAULT = frozenset(
    f"test_{family}"
    for family in (
        "attention convolution dtypes embedding matmul normalization optimizer random rnn softmax"
    ).split()
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name != "lowering" or item.path.stem in DEFAULT:
            continue
        if "opinfo" in item.name:
            item.add_marker(pytest.mark.slow)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tpu_core.pjrt import padded_array as arrays


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the padding of inputs with what must not be seen."""

    def blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return np.full(shape, np.nan if dtype.kind == "f" else 97).astype(dtype)

    monkeypatch.setattr(arrays, "blank", blank)

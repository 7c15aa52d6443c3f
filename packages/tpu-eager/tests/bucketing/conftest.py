"""Signatures from symbolic traces, compared with traces; padding that must not be seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tpu_core.padding import segment_signature
from tpu_core.padding.symbolic_signature import SymbolicSignatures
from tpu_core.pjrt import padded_array as arrays


@pytest.fixture
def signatures(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts of ops that are and are not traced at a size; both give the same signature."""
    seen: Counter[bool] = Counter()
    segments: list[Any] = []
    trace, at = segment_signature._trace, SymbolicSignatures.at

    def traced(segment: Any, known: Any) -> Any:
        segments.append(segment)
        try:
            return trace(segment, known)
        finally:
            segments.pop()

    def compared(self: SymbolicSignatures, index: int, node: Any, values: Any) -> Any:
        found = at(self, index, node, values)
        seen[found is None] += 1
        if found is not None:
            slots = [segments[-1].slots[i] for i in node.operands]
            operands = [(s.shape, s.dtype) for s in slots]
            lifted = segment_signature.lifted_numbers(segments[-1], index)
            expected, _ = segment_signature.trace(node.plan, operands, lifted)
            assert repr(found) == repr(expected), node.name
        return found

    monkeypatch.setattr(segment_signature, "_trace", traced)
    monkeypatch.setattr(SymbolicSignatures, "at", compared)
    return seen


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the padding of inputs with what must not be seen: NaN and large numbers."""
    random = np.random.default_rng(0)

    def blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if dtype == np.bool_:
            return random.random(shape) < 0.5
        filled = (random.standard_normal(shape) * 1e4).astype(dtype)
        if np.issubdtype(dtype, np.inexact):
            filled[random.random(shape) < 0.5] = np.nan
        return filled

    monkeypatch.setattr(arrays, "blank", blank)
